"""A coordinator whose decisions are journaled as the service does it."""

from __future__ import annotations

import tempfile
from typing import Any

from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server.coordinator import fleet, machine
from edgefl_server.coordinator.states import (
    AbandonRound,
    Answered,
    CloseRound,
    ModelReady,
    ReassignTasks,
    Rules,
    StartRound,
    TaskDeclined,
)
from edgefl_server.storage.journal import Journal, RunRecord
from edgefl_server.storage.update_storage import store_at
from edgefl_server.storage.update_table import AcceptedUpdate
from tests.server.aggregate.members import VERSION


class JournaledCoordinator:
    def __init__(self, rules: Rules) -> None:
        self.rules, self.now = rules, 0.0
        self.state = machine.initial(VERSION, 0.0)
        self.folder = tempfile.TemporaryDirectory()
        self.journal = Journal(
            "sqlite://", "demo", store_at(self.folder.name), versions=1 + rules.max_staleness
        )
        self.journal.begin_run(RunRecord("run", "digest", 1))

    def take(self, event: Any) -> None:
        current = self.state.round
        task = current.assignments.open.get(getattr(event, "device", "")) if current else None
        if current is not None and task is not None:
            self._answered(current.number, task, event)
        self._do(event)

    def _answered(self, number: int, task: fleet.Assignment, event: Any) -> None:
        match event:
            case Answered(accepted=True):
                none = PublishTraffic()
                figures = {"metrics": {}, "down": none, "up": none, "up_float32_bytes": 0}
                update = AcceptedUpdate(task, sha256="s", weight=1, share=0.5, data=b"x", **figures)
                self.journal.accept("run", number, [update])
            case Answered():
                row = "run", task.round, task.device, task.nonce, "s", "nan", ""
                self.journal.reject(*row, step=number, final=task)
            case TaskDeclined(nonce=task.nonce):
                self.journal.decline("run", task, event.reason)

    def _do(self, event: Any) -> None:
        self.state, actions = machine.step(self.rules, self.state, event, self.now)
        for action in actions:
            match action:
                case StartRound(round=begun):
                    self.journal.open_round("run", begun, b"")
                case ReassignTasks(over=over, tasks=tasks):
                    self.journal.reassign("run", over, tasks)
                case CloseRound(round=ended):
                    self.journal.end_round("run", ended.number, state="closed", outcome={})
                    self.check_closed()
                    self._do(ModelReady(f"v{ended.number}"))
                case AbandonRound(round=ended, restart=restart):
                    if restart:
                        self.journal.begin_again("run", ended.number)
                    self.journal.end_round("run", ended.number, state="abandoned", outcome={})

    def check_closed(self) -> None:
        """Compare the journal with the state where a closed round has no model yet."""

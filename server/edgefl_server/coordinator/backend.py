"""Execution of the coordinator's actions. The server and the simulator implement the same backend."""

from __future__ import annotations

from typing import Protocol

from edgefl.errors import EdgeflError
from edgefl_server.coordinator import states
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import Actions, OpenRound


class RoundBackend(Protocol):
    """Environment that rounds run in."""

    def open_round(self, opened: OpenRound) -> None:
        """Begin a round: its devices receive the model and their tasks."""

    def send_task(self, assignment: Assignment) -> None:
        """Send one device its task again."""

    def reassign(self, over: tuple[Assignment, ...], tasks: tuple[Assignment, ...]) -> None:
        """End the tasks ``over``, which take no update any more, and begin ``tasks``."""

    def close_round(self, ended: OpenRound) -> None:
        """Compute the new model of the accepted updates, then send the coordinator ``ModelReady``."""

    def abandon_round(self, ended: OpenRound, text: str, *, restart: bool) -> None:
        """End a round without a new model. ``restart``: the method begins again with the next round."""

    def finish(self) -> None:
        """End the run: all rounds are over."""

    def refuse(self, error: EdgeflError) -> None:
        """End the run unfinished."""

    def warn(self, text: str) -> None:
        """Report a warning to people."""


def perform(actions: Actions, backend: RoundBackend) -> None:
    """Perform the coordinator's actions in their order.

    Args:
        actions: Actions that :func:`edgefl_server.coordinator.machine.step` returned.
        backend: Environment to perform them in.
    """
    for action in actions:
        match action:
            case states.Open(round=opened):
                backend.open_round(opened)
            case states.SendTask(assignment=assignment):
                backend.send_task(assignment)
            case states.Reassign(over=over, tasks=tasks):
                backend.reassign(over, tasks)
            case states.Close(round=ended):
                backend.close_round(ended)
            case states.Abandon(round=ended, text=text, restart=restart):
                backend.abandon_round(ended, text, restart=restart)
            case states.Warn(text=text):
                backend.warn(text)
            case states.Refuse():
                backend.refuse(action.error)
            case states.Finish():
                backend.finish()

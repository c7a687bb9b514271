"""A run's folder as a server would leave it, made through the server's own journal, history and feed."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgefl.wire.mqtt.messages import Hello, encode
from edgefl.wire.mqtt.packets import Traffic
from server import events
from server.coordinator.fleet import Assignment, Assignments
from server.coordinator.roster import Device
from server.coordinator.states import OpenRound
from server.storage.feed import Feed
from server.storage.history import History
from server.storage.journal import Journal, Run
from server.storage.places import journal_at
from server.storage.update_files import UpdateFiles
from server.storage.update_rows import AcceptedUpdate

FEDERATION, RUN = "orchard", "0123456789abcdef"
_ROUND_S = 12.0
_TIERS = ("moderate", "strong", "weak")


class Made:
    """A folder that looks like that of a run of ``devices`` devices. What they do is decided by ``seed``."""

    def __init__(self, folder: Path, devices: int, rounds: int, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.names = [f"{_TIERS[at % 3]}-{at:04d}" for at in range(devices)]
        self._rounds = rounds
        self._random = random.Random(seed)
        self._now = time.time() - rounds * _ROUND_S
        self._journal = Journal(
            journal_at(folder / "journal.sqlite"), FEDERATION, UpdateFiles(folder / "updates")
        )
        self._history = History(folder)
        self.feed = Feed(folder, lambda: self._now)

    def close(self) -> None:
        self.feed.close()
        self._journal.close()

    def past(self) -> None:
        """The devices, and all rounds."""
        hello = encode(
            Hello(agent="bench", memory_bytes=64 << 20, cores=2, samples=600, engines={"onnxruntime": "1.20"})
        )
        self._journal.begin_run(Run(RUN, "digest", 1))
        self._journal.save_devices(
            (Device(name, tier_of(name), 600, True, self._now), hello) for name in self.names
        )
        self.feed.take(
            events.Started(
                federation=FEDERATION,
                run=RUN,
                rounds=self._rounds + 1,
                next_round=1,
                resumed=False,
                model_version="0" * 64,
                device="cpu",
            )
        )
        for name in self.names:
            self.feed.take(events.DeviceJoined(device=name, tier=tier_of(name)))
        for number in range(1, self._rounds + 1):
            self._round(number)

    def open(self, number: int) -> None:
        """A round that goes on."""
        self._now = time.time()
        self._opened(number)

    def progress(self, number: int, step: int) -> Iterator[events.DeviceSeen]:
        """Each device, ``step`` steps into a round."""
        self._now = time.time()
        for name in self.names:
            yield events.DeviceSeen(
                device=name,
                tier=tier_of(name),
                round=number,
                stage="train",
                step=step,
                steps=1000,
                loss=2.0 / (1 + step),
                step_ms=self._random.uniform(20, 60),
                peak_bytes=90 << 20,
            )

    def _opened(self, number: int) -> OpenRound:
        assignments = {
            name: Assignment(name, tier_of(name), number, f"{number:024x}", weight_limit=600, round=number)
            for name in self.names
        }
        opened = OpenRound(
            number, "0" * 64, self._now, self._now + _ROUND_S, len(self.names), Assignments(assignments)
        )
        self._journal.open_round(RUN, opened, b"")
        self.feed.take(
            events.RoundOpened(
                round=number, goal=opened.goal, devices=tuple(self.names), deadline=opened.deadline
            )
        )
        return opened

    def _round(self, number: int) -> None:
        """One round: most devices report, some decline, some say nothing, or too late."""
        opened = self._opened(number)
        began, missing, late = self._now, dict[str, str](), list[str]()
        for at, name in enumerate(self.names):
            self._now = began + (_ROUND_S - 2) * (at + 1) / len(self.names)
            luck = self._random.random()
            if luck < 0.02:
                self._journal.decline(RUN, opened.assignments[name], "policy")
                self.feed.take(events.Declined(device=name, round=number, reason="policy", text=""))
                missing[name] = "it declined (policy)"
            elif luck < 0.04:
                missing[name] = "it did not report in time"
                late += [name] if luck < 0.03 else []
            else:
                self._report(number, opened.assignments[name])
        self._now = began + _ROUND_S
        self._ended(number, missing)
        for name in late:
            text = f"round {number} takes no updates, it is over; drop the update"
            self.feed.take(events.Rejected(device=name, round=number, reason="closed-round", text=text))

    def _report(self, number: int, task: Assignment) -> None:
        loss, memory = 2.0 / number + self._random.random() / 10, 64 << 20
        down, up = Traffic(300_000, 310_000), Traffic(35_000, 36_000)
        update = AcceptedUpdate(
            task,
            sha256=f"{number:032x}{hash(task.device) & (2**128 - 1):032x}",
            weight=600,
            share=1.0,
            metrics={"loss": loss},
            down=down,
            up=up,
            up_float32_bytes=1_100_000,
            data=b"",
        )
        self._journal.accept(RUN, number, [update])
        tier = task.tier
        self.feed.take(
            events.UpdateAccepted(
                device=task.device, tier=tier, round=number, nonce=task.nonce, sha256="", weight=600
            )
        )
        self.feed.take(
            events.DeviceSeen(
                device=task.device,
                tier=tier,
                round=number,
                stage=events.REPORTED,
                loss=loss,
                step_ms=self._random.lognormvariate(3.5, 0.3),
                peak_bytes=memory + int(self._random.uniform(10, 14) * 2**20),
                idle_bytes=memory,
                down_bytes=down.payload,
                up_bytes=up.payload,
            )
        )

    def _ended(self, number: int, missing: dict[str, str]) -> None:
        reports = len(self.names) - len(missing)
        ended = events.RoundEnded(
            round=number, outcome="closed", reports=reports, missing=missing, seconds=_ROUND_S
        )
        outcome: dict[str, Any] = {
            "accuracy": 1 - 0.9 / number**0.5,
            "loss": 2.0 / number,
            "train_loss": 2.0 / number,
            "seconds": _ROUND_S,
            "reports": reports,
            "metrics": {"accuracy": 1 - 0.9 / number**0.5},
            "down_bytes": 300_000 * reports,
            "up_bytes": 35_000 * reports,
        }
        closed = events.RoundClosed(
            round=number,
            outcome="closed",
            rejected=0,
            weights_sha256="0" * 64,
            server_down_bytes=300_000,
            **outcome,
        )
        self._journal.end_round(RUN, number, state="closed", outcome=outcome)
        self.feed.take(ended)
        self.feed.take(closed)
        self._history.take(closed)
        self.feed.take(
            events.Vitals(
                inbox=self._random.randrange(20),
                server_lag_s=self._random.expovariate(100),
                broker_lag_s=self._random.expovariate(500),
                cpu_s=number * 3.0,
                rss_bytes=400 << 20,
            )
        )


def tier_of(name: str) -> str:
    return name.rpartition("-")[0]

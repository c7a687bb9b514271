"""``python -m benchmarks dashboard``: first paint of the fleet page over a run of many devices, and cost of its updates."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer

from benchmarks.browser import Browser
from benchmarks.machine import cpu_seconds, family
from benchmarks.options import Json
from benchmarks.results import bench
from edgefl.errors import EdgeflError
from edgefl.system.processes import PARENT, child_process, module_command
from edgefl.system.sizes import size
from edgefl.wire.mqtt.messages import Hello, encode
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl_server import events
from edgefl_server.coordinator.fleet import Assignment, Assignments
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.storage.audit import HistoryWriter
from edgefl_server.storage.feed import FeedWriter
from edgefl_server.storage.journal import Journal, RunRecord
from edgefl_server.storage.update_storage import UpdateFiles, journal_at
from edgefl_server.storage.update_table import AcceptedUpdate


class DashboardRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the page, and its cost while all devices report their progress 5 times a second for ``seconds``.

    Attributes:
        ready_s: from the start of the page's process until it has read the whole run.
        first_paint_s: from the request of the page to its first content in headless Chromium, a median.
        updates_per_s: progress messages that reach the page; at most one a second for each device.
        news_per_s: changes that the browser receives.
        cpu_share, browser_cpu_share: shares of a core of the page's process and of the browser.
        rss_bytes: memory of the page's process.
        feed_bytes, journal_bytes: sizes of its input.
    """

    devices: int
    rounds: int
    ready_s: float
    first_paint_s: float
    page_bytes: int
    seconds: float
    updates_per_s: float
    news_per_s: float
    cpu_share: float
    browser_cpu_share: float
    rss_bytes: int
    feed_bytes: int
    journal_bytes: int


def dashboard(
    devices: Annotated[list[int] | None, typer.Option(help="may be repeated; default: 1000")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds that are over")] = 100,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="time in which devices report their progress")
    ] = 20.0,
    as_json: Json = False,
) -> None:
    """Measure the first paint of the fleet's page, and the cost of updating it while all devices report their progress.

    The run is synthetic, written through the server's own journal and feed. `edgefl dashboard` serves the page, and headless
    Chromium opens it. 1,000 devices and 100 rounds take some minutes to write.

    Examples:

      python -m benchmarks dashboard --json

      python -m benchmarks dashboard --devices 100 --devices 1000 --rounds 20
    """

    bench(
        "dashboard",
        "the fleet's page",
        devices or [1000],
        lambda count, say: measure(devices=count, rounds=rounds, seconds=seconds, say=say),
        _dashboard_columns,
        as_json,
    )


def _dashboard_columns(row: DashboardRow) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "rounds": row.rounds,
        "ready s": row.ready_s,
        "first paint s": row.first_paint_s,
        "words/s": row.updates_per_s,
        "of a core": f"{row.cpu_share:.1%}",
        "browser": f"{row.browser_cpu_share:.1%}",
        "memory": size(row.rss_bytes),
    }


_TIMES_A_SECOND = 5
_OPENED = 5
_READY_S = 120.0
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_NEWS = "Number(document.body.dataset.news || 0)"


def measure(
    *, devices: int, rounds: int, seconds: float = 20.0, say: Callable[[str], None] = lambda _: None
) -> DashboardRow:
    """Synthesize a run of ``rounds`` rounds, serve its page, open it, and update it for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-dashboard-") as name:
        folder = Path(name)
        say(f"{devices} devices, {rounds} rounds: making up their run")
        made = SyntheticRun(folder, devices, rounds)
        made.write_past()
        made.open_round(rounds + 1)
        try:
            began = time.monotonic()
            with served(folder) as (url, process), Browser() as browser:
                ready_s = time.monotonic() - began
                say("looking at the page")
                paints = [_paint_s(browser, url) for _ in range(_OPENED)]
                say(f"updating it for {seconds:g} s")
                browser.until(_NEWS)
                lines, news = _lines(folder), browser.value(_NEWS)
                ours, theirs = cpu_seconds([process]), cpu_seconds(family(browser.pid))
                began, step = time.monotonic(), 0
                while time.monotonic() < began + seconds:
                    for event in made.progress(rounds + 1, step):
                        made.feed.take(event)
                    step += 1
                    time.sleep(max(0.0, began + step / _TIMES_A_SECOND - time.monotonic()))
                took = time.monotonic() - began
                return DashboardRow(
                    devices=len(made.names),
                    rounds=rounds,
                    ready_s=round(ready_s, 2),
                    first_paint_s=round(statistics.median(paints), 3),
                    page_bytes=len(urllib.request.urlopen(url, timeout=30).read()),
                    seconds=round(took, 1),
                    updates_per_s=round((_lines(folder) - lines) / took, 1),
                    news_per_s=round((browser.value(_NEWS) - news) / took, 2),
                    cpu_share=round((cpu_seconds([process]) - ours) / took, 4),
                    browser_cpu_share=round((cpu_seconds(family(browser.pid)) - theirs) / took, 4),
                    rss_bytes=process.memory_info().rss,
                    feed_bytes=sum(path.stat().st_size for path in folder.glob("events*.jsonl")),
                    journal_bytes=sum(path.stat().st_size for path in folder.glob("journal.sqlite*")),
                )
        finally:
            made.close()


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the page of the run in ``folder``; yield its address and process once it has read the run."""
    command = module_command("edgefl", "dashboard", str(folder), "--listen", "0", "--json")
    environment = {**os.environ, PARENT: str(os.getpid())}
    with child_process(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        _wait(url)
        yield url, psutil.Process(process.pid)


def _wait(url: str) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/readyz", timeout=30):
            return
        time.sleep(0.02)
    raise EdgeflError(f"{url} was not ready within {_READY_S:g} s")


def _paint_s(browser: Browser, url: str) -> float:
    """Return the seconds from the request of the page to its first content."""
    browser.open(url)
    return float(browser.until(_PAINT)) / 1000


def _lines(folder: Path) -> int:
    """Return the number of lines in the feed."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("events*.jsonl"))


FEDERATION, RUN = "orchard", "0123456789abcdef"
_ROUND_S = 12.0
_TIERS = ("moderate", "strong", "weak")


class SyntheticRun:
    """Folder like that of a run of ``devices`` devices, written through the server's own journal and feed.

    ``seed`` decides the devices' outcomes.
    """

    def __init__(self, folder: Path, devices: int, rounds: int, seed: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.names = [f"{_TIERS[at % 3]}-{at:04d}" for at in range(devices)]
        self._rounds = rounds
        self._random = random.Random(seed)
        self._now = time.time() - rounds * _ROUND_S
        self._journal = Journal(
            journal_at(folder / "journal.sqlite"), FEDERATION, UpdateFiles(folder / "updates")
        )
        self._history = HistoryWriter(folder)
        self.feed = FeedWriter(folder, lambda: self._now)

    def close(self) -> None:
        self.feed.close()
        self._journal.close()

    def write_past(self) -> None:
        """Write the devices and all closed rounds."""
        hello = encode(
            Hello(agent="bench", memory_bytes=64 << 20, cores=2, samples=600, engines={"onnxruntime": "1.20"})
        )
        self._journal.begin_run(RunRecord(RUN, "digest", 1))
        self._journal.save_devices(
            (RosterEntry(name, tier_of(name), 600, True, self._now), hello) for name in self.names
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

    def open_round(self, number: int) -> None:
        """Open a round now, and leave it open."""
        self._now = time.time()
        self._open_round(number)

    def progress(self, number: int, step: int) -> Iterator[events.DeviceSeen]:
        """Yield the progress of each device after ``step`` steps of a round."""
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

    def _open_round(self, number: int) -> OpenRound:
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
        """Write one round: most devices report, some decline, some report late or not at all."""
        opened = self._open_round(number)
        began, missing, late = self._now, dict[str, str](), list[str]()
        for at, name in enumerate(self.names):
            self._now = began + (_ROUND_S - 2) * (at + 1) / len(self.names)
            luck = self._random.random()
            if luck < 0.02:
                self._journal.decline(RUN, opened.assignments[name], "policy")
                self.feed.take(
                    events.ParticipationDeclined(device=name, round=number, reason="policy", text="")
                )
                missing[name] = "it declined (policy)"
            elif luck < 0.04:
                missing[name] = "it did not report in time"
                late += [name] if luck < 0.03 else []
            else:
                self._report(number, opened.assignments[name])
        self._now = began + _ROUND_S
        self._end_round(number, missing)
        for name in late:
            text = f"round {number} takes no updates, it is over; drop the update"
            self.feed.take(events.Rejected(device=name, round=number, reason="closed-round", text=text))

    def _report(self, number: int, task: Assignment) -> None:
        loss, memory = 2.0 / number + self._random.random() / 10, 64 << 20
        down, up = PublishTraffic(300_000, 310_000), PublishTraffic(35_000, 36_000)
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

    def _end_round(self, number: int, missing: dict[str, str]) -> None:
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
    """Return the tier of a device of :class:`SyntheticRun`."""
    return name.rpartition("-")[0]

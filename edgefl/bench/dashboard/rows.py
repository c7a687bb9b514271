"""The fleet's page over a run of many devices: how soon it is seen, and what keeping it new costs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from edgefl.bench.common.browser import Browser
from edgefl.bench.common.processes import cpu_seconds, family
from edgefl.bench.dashboard.folder import Made
from edgefl.system.parent import PARENT
from edgefl.wire.errors import EdgeflError

_TIMES_A_SECOND = 5
_OPENED = 5
_READY_S = 120.0
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_NEWS = "Number(document.body.dataset.news || 0)"


class DashboardRow(msgspec.Struct, frozen=True, kw_only=True):
    """``ready_s``: from the start of the page's process until it has read all that the run left. ``first_paint_s``: from
    asking for the page until its first content is seen, the median of several times, in headless Chromium.

    While all devices tell of their progress 5 times a second for ``seconds``: ``updates_per_s`` words that reach the page
    (of a device one a second), ``news_per_s`` times that the browser is sent what changed, and the shares of a core that the
    page's process and the browser take. ``rss_bytes`` is the process's memory then, ``feed_bytes`` and ``journal_bytes``
    what it reads."""

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


def measure(
    *, devices: int, rounds: int, seconds: float = 20.0, tell: Callable[[str], None] = lambda _: None
) -> DashboardRow:
    """A run of ``rounds`` rounds made up, its page served, looked at, and kept new for ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-dashboard-") as name:
        folder = Path(name)
        tell(f"{devices} devices, {rounds} rounds: making up their run")
        made = Made(folder, devices, rounds)
        made.past()
        made.open(rounds + 1)
        try:
            began = time.monotonic()
            with served(folder) as (url, process), Browser() as browser:
                ready_s = time.monotonic() - began
                tell("looking at the page")
                paints = [_painted(browser, url) for _ in range(_OPENED)]
                tell(f"keeping it new for {seconds:g} s")
                return _kept_new(made, folder, rounds + 1, seconds, url, process, browser, ready_s, paints)
        finally:
            made.close()


def _kept_new(
    made: Made,
    folder: Path,
    number: int,
    seconds: float,
    url: str,
    process: psutil.Process,
    browser: Browser,
    ready_s: float,
    paints: list[float],
) -> DashboardRow:
    browser.until(_NEWS)
    lines, news = _lines(folder), browser.value(_NEWS)
    began, ours, theirs = time.monotonic(), cpu_seconds([process]), cpu_seconds(family(browser.pid))
    step = 0
    while time.monotonic() < began + seconds:
        for event in made.progress(number, step):
            made.feed.take(event)
        step += 1
        time.sleep(max(0.0, began + step / _TIMES_A_SECOND - time.monotonic()))
    took = time.monotonic() - began
    return DashboardRow(
        devices=len(made.names),
        rounds=number - 1,
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


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The page's address and its process, once it has read everything."""
    command = [sys.executable, "-m", "edgefl", "dashboard", str(folder), "--listen", "0", "--json"]
    environment = {**os.environ, PARENT: str(os.getpid())}
    served = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
    try:
        assert served.stdout is not None
        url = json.loads(served.stdout.readline())["url"]
        _wait(url)
        yield url, psutil.Process(served.pid)
    finally:
        served.terminate()
        served.wait()
        if served.stdout is not None:
            served.stdout.close()


def _wait(url: str) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/readyz", timeout=30):
            return
        time.sleep(0.02)
    raise EdgeflError(f"the page did not get ready in {_READY_S:g} s")


def _painted(browser: Browser, url: str) -> float:
    """Seconds from asking for the page to its first content."""
    browser.open(url)
    return float(browser.until(_PAINT)) / 1000


def _lines(folder: Path) -> int:
    """Return the number of lines in the feed."""
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("events*.jsonl"))

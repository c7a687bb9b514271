"""The page in a real browser, while a real server trains scripted devices over a real broker."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.browser import Browser
from edgefl.wire.limits import Limits
from edgefl_server.events import Event, Finished, Ordered, RoundClosed, RoundOpened
from edgefl_server.operations import Mailbox
from edgefl_server.storage.audit import HistoryWriter
from edgefl_server.storage.feed import FeedWriter
from tests.conftest import Mosquitto
from tests.server.dashboard.served import TOKEN, PageProcess
from tests.server.fleet import MakeDevice, RunningServer, ScriptedDevice, plan_for, silent

_ROWS = "[...document.querySelectorAll('#{} tr')].map(row => row.dataset.key).join()"
_STATE = "document.querySelector('[data-key=\"{}\"] .state').textContent"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        opened.screen(1280, 900)
        yield opened


def served(
    mosquitto: Mosquitto, limits: Limits, federation: str, out: Path, rounds: int = 3
) -> tuple[RunningServer, FeedWriter]:
    """A server whose folder has what a page reads."""
    out.mkdir(exist_ok=True)
    feed, history = FeedWriter(out), HistoryWriter(out)

    def hear(event: Event) -> None:
        feed.take(event)
        history.take(event)

    plan = plan_for(federation, limits, rounds=rounds, min_devices=2, min_reports=2)
    return RunningServer.start(plan, mosquitto.address, out, hear), feed


def report(device: ScriptedDevice) -> None:
    """For the round that is open."""
    opened = device.wait_open()
    task = device.tasks.get(timeout=50)
    while task.round != opened.round:
        task = device.tasks.get(timeout=50)
    device.report(task, opened)


Serving = Callable[..., tuple[RunningServer, FeedWriter]]


@pytest.fixture
def serving(mosquitto: Mosquitto, limits: Limits) -> Serving:
    return functools.partial(served, mosquitto, limits)


def test_a_page_follows_a_run_and_its_devices(
    device: MakeDevice, serving: Serving, federation: str, tmp_path: Path, browser: Browser
) -> None:
    out = tmp_path / "out"
    running, feed = serving(federation, out)
    with PageProcess.of(out, TOKEN) as page:
        shown = browser.open(page.url)
        browser.until("document.body.dataset.news")
        strong, weak = device("strong-0", silent), device("weak-0", silent)
        running.wait_for(RoundOpened)

        browser.until(f"{_ROWS.format('devices')} === 'strong-0,weak-0'")
        browser.until(f"{_STATE.format('strong-0')} === 'working'")
        report(strong)
        browser.until(f"{_STATE.format('strong-0')} === 'reported'")
        report(weak)
        running.wait_for(RoundClosed)
        browser.until(f"{_ROWS.format('rounds')}.includes('1')")
        browser.until(
            "document.querySelector('#rounds [data-key=\"1\"] td:nth-child(4)').textContent === '2'"
        )
        browser.until(
            "[...document.querySelectorAll('.chart')].some(figure => figure.querySelector('canvas'))"
        )

        _finds_devices(browser)
        _gives_orders(browser, running, out)
        _opens_a_device(browser, page)
        outside = [url for url in shown.requests if not url.startswith((page.url, "data:"))]
        assert outside == []
        assert [problem for problem in shown.problems if "401" not in problem] == [], "but the wrong token's"
    running.stop()
    feed.close()


def _finds_devices(browser: Browser) -> None:
    """By the keyboard alone, and the other device is not shown, whatever it does."""
    browser.type("/weak")
    browser.until(f"{_ROWS.format('devices')} === 'weak-0'")
    assert browser.value("location.search") == "?q=weak"
    assert browser.value("document.activeElement.name") == "q"
    browser.press("Escape", 27)
    browser.value("(() => { const form = document.getElementById('filter'); form.elements.q.value = ''; "
                  "form.elements.state.value = 'offline'; form.dispatchEvent(new Event('input')); })()")  # fmt: skip
    browser.until(f"{_ROWS.format('devices')} === ''")


def _gives_orders(browser: Browser, running: RunningServer, out: Path) -> None:
    browser.value("confirm = () => true, document.querySelector('details').open = true")
    press = "document.querySelector('[data-order=pause]').click()"
    answer = "document.querySelector('#operator output').textContent"
    browser.value(press)
    browser.until(f"{answer}.includes('missing or wrong')")
    browser.value(f"document.querySelector('#operator [name=token]').value = '{TOKEN}'; {press}")
    browser.until(f"{answer}.includes('left for the server')")
    ordered = running.wait_for(Ordered)
    assert (ordered.order, ordered.by, ordered.done, Mailbox(out).paused) == (
        "pause",
        "127.0.0.1",
        True,
        True,
    )
    browser.until("document.getElementById('head').textContent.includes('paused')")


def _opens_a_device(browser: Browser, page: PageProcess) -> None:
    browser.open(f"{page.url}/?q=strong-0")
    browser.value("document.querySelector('#devices a').focus()")
    browser.press("Enter", 13)
    browser.until("document.body?.dataset.live === 'device' && document.body.dataset.news")
    assert browser.value(f"{_ROWS.format('parts')}").split(",")[-1] == "1"
    assert "is there, as tier strong" in browser.value("document.getElementById('log').textContent")
    text = browser.value(
        "fetch([...document.links].find(a => a.textContent === 'CSV').href).then(a => a.text())"
    )
    (row, *_) = csv.DictReader(io.StringIO(text))
    assert (row["device"], row["round"], row["status"], row["loss"]) == ("strong-0", "1", "accepted", "1.5")


_PLOTS = (
    "Object.fromEntries([...document.querySelectorAll('.chart:not([hidden])')].map(figure => "
    "[figure.dataset.chart, (({axes, scales, data, series}, box) => ({"
    "labels: axes.map(each => each.label), x: [scales.x.min, scales.x.max], y: [scales.y.min, scales.y.max], "
    "marks: axes[1]._values.map(String), data, dashes: series.map(each => Boolean(each.dash)), "
    "legend: figure.querySelector('.u-legend')?.innerText ?? '', top: box.top, "
    "swatches: [...figure.querySelectorAll('.u-marker')].map(each => each.style.borderTopStyle)"
    "}))(figure.querySelector('.plot').plot, figure.getBoundingClientRect())]))"
)


def test_charts_hide_nothing_and_name_their_axes(page: PageProcess, browser: Browser) -> None:
    browser.open(page.url)
    browser.until("document.querySelector('.chart canvas') !== null")
    plots = browser.value(_PLOTS)

    assert plots["score"]["y"] == [0, 1]
    assert all(label for plot in plots.values() for label in plot["labels"])
    assert not any(
        ":" in plot["legend"] or "--" in plot["legend"] for name, plot in plots.items() if name != "lag"
    )
    dashed = [swatch == "dashed" for swatch in plots["bytes"]["swatches"]]
    assert dashed == plots["bytes"]["dashes"] and any(dashed)
    _, *stack = plots["fates"]["data"]
    assert all(list(tops) == sorted(tops, reverse=True) for tops in zip(*stack, strict=True))
    middles, counts = plots["seconds"]["data"]
    low, high = plots["seconds"]["x"]
    assert low < middles[0] and middles[-1] < high and sum(counts) > 0
    assert not any("." in mark for mark in plots["seconds"]["marks"])
    rows = [plot["top"] for plot in plots.values()]
    assert rows.count(max(rows)) > 1


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_fits_a_phone_and_the_dark(dark: bool, page: PageProcess, browser: Browser) -> None:
    browser.screen(360, 740, dark=dark, phone=True)
    try:
        browser.open(page.url)
        browser.until("document.querySelector('.chart canvas') !== null")
        assert browser.value("document.documentElement.scrollWidth") == 360
        ground, ink = browser.value(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        assert (brightness(ground) < 60, brightness(ink) > 200) == (dark, dark)
        top = "document.querySelector('{}').getBoundingClientRect().top"
        assert browser.value(f"{top.format('#rounds')} < {top.format('.charts')}")
        tall = "[...document.querySelectorAll('input, select, button')].filter(a => a.checkVisibility())"
        assert browser.value(f"{tall}.every(a => a.getBoundingClientRect().height >= 30)")
    finally:
        browser.screen(1280, 900)


def brightness(colour: str) -> float:
    """Of ``rgb(r, g, b)``, 0 to 255."""
    values = [float(each) for each in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(values) / 3


@pytest.mark.slow
def test_a_killed_page_changes_nothing_and_the_next_shows_all(
    mosquitto: Mosquitto, limits: Limits, federation: str, tmp_path: Path, browser: Browser
) -> None:
    def trained(out: Path, *, watched: bool) -> str:
        name = f"{federation}-{watched}"
        running, feed = served(mosquitto, limits, name, out, rounds=2)
        devices = [
            ScriptedDevice(mosquitto.address, name, each, limits, silent) for each in ("strong-0", "weak-0")
        ]
        with PageProcess.of(out) if watched else nullcontext() as first:
            if first is not None:
                browser.open(first.url)
            report(devices[0])
            if first is not None:
                browser.until(f"{_STATE.format('strong-0')} === 'reported'")
                first.kill()
                browser.until("document.getElementById('link').textContent.includes('is away')")
            report(devices[1])
            for each in devices:
                report(each)
            finished = running.wait_for(Finished)
        running.join()
        feed.close()
        for each in devices:
            each.stop()
        return str(finished.weights_sha256)

    alone = trained(tmp_path / "alone", watched=False)
    watched = trained(tmp_path / "watched", watched=True)

    assert watched == alone
    with PageProcess.of(tmp_path / "watched") as again:
        rows = again.get("/api/rounds.json").json
        assert [(row["round"], row["arrived"]) for row in rows] == [(1, 2), (2, 2)]
        assert again.get("/api/run.json").json[0]["phase"] == "done"

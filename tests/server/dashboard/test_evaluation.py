"""Evaluation rounds on the dashboard: the round's page, the charts, the tables and Prometheus's metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.browser import Browser
from benchmarks.dashboard import SyntheticRun
from edgefl_server.dashboard import ALERTS, GRAFANA
from edgefl_server.dashboard.state import fold
from edgefl_server.dashboard.state.fleet import Fleet
from edgefl_server.dashboard.state.source import FolderSource
from edgefl_server.dashboard.views import parts, summary
from edgefl_server.dashboard.views.summary import FleetSnapshot
from edgefl_server.events import DeviceSeen, Ordered, RoundEnded, RoundOpened
from edgefl_server.storage.audit import HistoryWriter
from tests.server.dashboard.served import PageProcess
from tests.server.dashboard.test_metrics import samples
from tests.support.events import device_evaluation, round_closed

DEVICES = ("weak-0002", "weak-0005")
NUMBER = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 20 devices that trained for 3 rounds, and evaluated the model in a fourth."""
    path = tmp_path_factory.mktemp("run") / "out"
    made = SyntheticRun(path, devices=20, rounds=3)
    made.write_past()
    opened = RoundOpened(round=NUMBER, goal=2, devices=DEVICES, deadline=2e9, evaluates=True)
    seen = [
        DeviceSeen(device=name, tier="weak", round=NUMBER, stage="reported", peak_bytes=1, idle_bytes=1)
        for name in DEVICES
    ]
    ended = RoundEnded(round=NUMBER, outcome="closed", reports=2, missing={}, seconds=1.0)
    scores = {"accuracy": None, "loss": None, "train_loss": None}
    closed = round_closed(NUMBER, **scores, evaluation=device_evaluation())
    for event in (opened, *seen, ended, closed):
        made.feed.take(event)
    made.close()
    HistoryWriter(path).take(closed)
    return path


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[PageProcess]:
    with PageProcess.of(folder) as served:
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


def fleet_of(folder: Path) -> Fleet:
    return FolderSource(folder).begin()


def test_the_history_alone_shows_the_results(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_bytes((folder / "history.jsonl").read_bytes())
    for found in (fleet_of(folder), fleet_of(tmp_path)):
        assert summary.newest_evaluation(found) == device_evaluation()
        row = FleetSnapshot(found).round(NUMBER)
        assert row.evaluates and row.evaluation == device_evaluation()
        assert summary.point(row).devices == (0.782, 0.755, 0.654)
        assert summary.point(row).score is None


def test_a_round_that_measures_statistics_is_called_so() -> None:
    fleet = Fleet()
    opened = RoundOpened(round=NUMBER, goal=2, devices=DEVICES, deadline=2e9, evaluates=True, measures=True)
    fold.take(opened, fleet, 1.0)
    fold.take(round_closed(NUMBER, accuracy=None, loss=None, train_loss=None, measures=True), fleet, 2.0)
    row = FleetSnapshot(fleet).round(NUMBER)
    assert row.evaluates and row.measures and "closed, measuring" in str(parts.round_(row))


def test_an_evaluation_is_no_newest_report_and_no_score_of_the_server(folder: Path) -> None:
    found = fleet_of(folder)
    run = summary.run_row(found)
    assert run.accuracy is not None and (run.metric, run.device_metric) == ("accuracy", 0.782)
    last = summary.last_report(found, found.devices[DEVICES[0]])
    assert last is not None and last.round < NUMBER
    on_devices = {row.tier: row.device_metric for row in summary.tier_rows(found)}
    assert (on_devices["strong"], on_devices["weak"]) == (None, 0.7)
    fold.apply(found, 1e9, Ordered(order="rollback", by="", done=True, version=2))
    assert summary.newest_evaluation(found) is None


def test_prometheus_reads_the_newest_evaluation(page: PageProcess) -> None:
    found = samples(page)
    stats = {"total": 0.782, "median": 0.755, "worst_decile": 0.654}
    assert {stat: found["edgefl_devices_metric", ("accuracy", stat)] for stat in stats} == stats
    assert found["edgefl_devices_metric", ("loss", "worst_decile")] == 0.9
    assert found["edgefl_tier_metric", ("accuracy", "weak")] == 0.7
    assert ("edgefl_tier_metric", ("accuracy", "strong")) not in found


def test_grafanas_dashboard_and_the_alerts_ask_for_metrics_that_exist(page: PageProcess) -> None:
    there = {name for name, _ in samples(page)}
    panels = json.loads(GRAFANA.read_text())["panels"]
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules
    ]

    assert len(panels) > 10 and len(rules) > 5
    assert {name for text in asked for name in re.findall(r"\bedgefl_\w+", text)} <= there


def test_evaluations_are_a_table(page: PageProcess) -> None:
    rows = page.get("/api/evaluations.json").json
    assert [(row["round"], row["tier"], row["metric"], row["value"]) for row in rows] == [
        (NUMBER, "", "accuracy", 0.782),
        (NUMBER, "", "loss", 0.61),
        (NUMBER, "weak", "accuracy", 0.7),
        (NUMBER, "weak", "loss", 0.61),
    ]
    lines = page.get("/api/evaluations.csv").text.splitlines()
    assert lines[0].startswith("round,trained_rounds,tier,devices,rows,metric,value,median,worst_decile")
    assert lines[1] == f'{NUMBER},5,,5,50.0,accuracy,0.782,0.755,0.654,"[0,0,0,0,0,0,1,3,1,0]"'


_SHAPES = (
    "[...document.querySelectorAll('.histograms figure')].map(figure => ({"
    "title: figure.querySelector('figcaption').textContent, "
    "texts: [...figure.querySelectorAll('text')].map(each => each.textContent), "
    "heights: [...figure.querySelectorAll('rect')].map(each => Number(each.getAttribute('height')))}))"
)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_the_round_shows_tiers_and_histograms_on_a_phone(
    dark: bool, page: PageProcess, browser: Browser
) -> None:
    browser.screen(360, 740, dark=dark, phone=True)
    browser.open(f"{page.url}/rounds/{NUMBER}")
    browser.until("document.body.dataset.news > 0")

    assert browser.value("document.documentElement.scrollWidth") == 360
    everyone, weak = browser.value(_SHAPES)
    assert (
        everyone["title"] == "all: 5 devices by accuracy" and weak["title"] == "weak: 3 devices by accuracy"
    )
    assert everyone["texts"] == ["1", "3", "1", "0", "0.5", "1", "accuracy"]
    assert [height > 0 for height in weak["heights"]] == [False] * 6 + [True, True, False, False]
    text = browser.value("document.getElementById('evaluation').innerText")
    assert "after 5 training rounds" in text and "78.2%" in text and "65.4%" in text
    assert "evaluate.least_group: strong" in text
    fill = "getComputedStyle(document.querySelector('.histograms {}')).fill"
    assert browser.value(fill.format("rect")) != browser.value(fill.format("text"))


def test_the_chart_has_the_devices_as_points_beside_the_server(page: PageProcess, browser: Browser) -> None:
    browser.screen(1280, 900)
    browser.open(page.url)
    browser.until("document.querySelector('[data-chart=score] canvas') !== null")
    labels, data, legend = browser.value(
        "(figure => [figure.querySelector('.plot').plot.series.map(each => each.label), "
        "figure.querySelector('.plot').plot.data, figure.querySelector('.u-legend').innerText])"
        "(document.querySelector('[data-chart=score]'))"
    )
    assert labels == ["round", "accuracy, test data", "devices", "median device", "worst decile"]
    rounds, server, *devices = data
    assert rounds == [1, 2, 3, 4] and server[3] is None and None not in server[:3]
    assert devices == [[None] * 3 + [value] for value in (0.782, 0.755, 0.654)]
    cells = "[...document.querySelectorAll('#tiers .optional')].map(each => each.innerText)"
    assert sorted(browser.value(cells)) == ["", "", "70.0%"]
    visible = "[...document.querySelectorAll('.optional')].every(each => each.checkVisibility())"
    assert browser.value(visible)
    browser.value("document.querySelectorAll('#tiers td.optional').forEach(each => each.replaceChildren())")
    assert not browser.value(visible), "a run without evaluations has no such column"
    assert "devices0.782" in legend and f"test data{server[2]:.2g}" in legend, "the newest of each"

"""Claims are judged by paired seeds, and tables say what was found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from benchmarks.device_table import EMBRACING, TIERS, WIDTH, DeviceTimes
from edgefl.api.federation import load_federation
from reproduce.__main__ import app
from reproduce.campaign import ENTRIES, campaign, reproduce, selected, tasks
from reproduce.catalog import NAMES
from reproduce.command import conclude
from reproduce.embracingfl import device
from reproduce.entry import SCALES, Claim, Column, Computed, Entry, Federated, Measurements, Scale, percent
from reproduce.fafed import counterexample
from reproduce.page import overview, summaries, write_entry
from reproduce.record import ClaimSummary, Record, Summary, read_record, run_arm, summed_up
from reproduce.results import Judged, Results, above, ahead_of_each, not_below, ordered
from reproduce.withdrawn import _TABLE, ERRORS, withdrawn
from tests.cli.runner import runner
from tests.support.errors import ConfigError, refuses

RESULTS = Results(
    [0, 1, 2],
    {"a": [{"x": 0.5}, {"x": 0.6}, {"x": 0.7}], "b": [{"x": 0.4}, {"x": 0.61}, {"x": 0.5}]},
    {"a": [{"l": [(1, 1.0), (2, 3.0)]}, {"l": [(1, 3.0)]}, {"l": [(1, 5.0), (2, 9.0)]}], "b": [{}, {}, {}]},
)
TINY = {
    "model.name": "mlp",
    "data.name": "digits",
    "federation.rounds": 2,
    "data.train_samples": 200,
    "data.test_samples": 50,
    "tiers": {"strong": {"count": 2, "devices": ["strong-*"]}},
}


def test_claims_are_judged_by_paired_differences() -> None:
    assert above("a", "b", "x")(RESULTS).held
    assert above("a", "b", "x")(RESULTS).ours == "+9.67 (-1.00 to +20.00)"
    assert not above("a", "b", "x", every_seed=True)(RESULTS).held
    assert not above("a", "b", "x", by=0.1)(RESULTS).held
    assert not_below("b", "a", "x", slack=0.1)(RESULTS).held
    assert not not_below("b", "a", "x", slack=0.05)(RESULTS).held
    assert ordered(("b", "a"), "x")(RESULTS).held and not ordered(("a", "b"), "x", slack=0.09)(RESULTS).held


def test_the_nearest_of_several_decides() -> None:
    found = Results([0, 1], {arm: [{"x": x}] * 2 for arm, x in (("a", 0.8), ("b", 0.7), ("c", 0.79))}, {})

    assert ahead_of_each("a", ("b", "c"), "x")(found).held
    assert ahead_of_each("a", ("b", "c"), "x")(found).ours == "+1.00 (+1.00 to +1.00) on c"
    assert not ahead_of_each("c", ("a", "b"), "x")(found).held
    below = ahead_of_each("b", ("a", "c"), "x", lower=True, unit=1.0, digits=3)(found)
    assert below.held and below.ours == "-0.090 (-0.090 to -0.090) on c"
    assert not ahead_of_each("c", ("a", "b"), "x", lower=True)(found).held


def test_lines_are_means_where_every_seed_has_a_point() -> None:
    assert RESULTS.line("a", "l") == [(1, 3.0)] and RESULTS.line("b", "l") == []


def test_a_figure_that_no_run_told_is_named() -> None:
    with refuses(ConfigError, arm="a", figure="y"):
        RESULTS.of("a", "y")


def _records(folder: Path, entry: Entry) -> list[Record]:
    return [
        run_arm(entry.name, arm, task.scale, task.seed, task.folder, lambda _: None)
        for task, arm in tasks(entry, "smoke", 2, folder)
    ]


def test_a_table_has_means_beside_the_papers_numbers(tmp_path: Path) -> None:
    entry = Entry(
        name="paper/table",
        what="A table",
        arms=lambda _: [
            Computed(
                "one", lambda work: Measurements({"x": 0.25 + work.seed / 4}, {}, {"picture.svg": "<svg/>"})
            ),
            Federated(
                "two",
                TINY,
                lambda simulation: Measurements({"x": 0.1, "rounds": float(len(simulation.history))}),
            ),
        ],
        columns=(percent("x", "x, %"), Column("rounds", "rounds", digits=0)),
        published={"one": {"x": 0.5}},
        claims=(
            Claim("H1", "one is ahead", "+10", above("one", "two", "x")),
            Claim("H2", "two is ahead", "", above("two", "one", "x"), doubt="it is not"),
        ),
    )
    records = _records(tmp_path, entry)
    summary = summed_up(entry, "smoke", records)
    files = write_entry(entry, summary, records, tmp_path)

    page = (tmp_path / "paper/table/README.md").read_text()
    assert "| one | 37.50 ± 17.68 | 50.00 | - |" in page and "| two | 10.00 | - | 2 |" in page
    assert "| H1: one is ahead | +10 | +27.50 (+15.00 to +40.00) | yes | - |" in page
    assert "**no**: it is not" in page and "1 of 2 claims held" in overview([summary])
    assert "picture.svg" in {file.name for file in files}
    assert summary.command == "python -m reproduce paper/table --scale smoke --seeds 2" and not summary.broken


def test_each_withdrawn_claim_meets_a_published_one() -> None:
    found = summaries(Path(__file__).parents[2] / "docs" / "results")
    claims = [(summary.entry, f"{claim.rank}: {claim.text}") for summary in found for claim in summary.claims]

    for entry, start, error in _TABLE:
        assert error in ERRORS
        assert any(name.startswith(entry) and text.startswith(start) for name, text in claims), (entry, start)
    page = overview(found)
    assert page.count("**withdrawn**") == sum(bool(withdrawn(*each)) for each in claims) > 0
    assert "| +2.73, +2.44 | global +16.77" in page and "+15.69 to +16.92) | **withdrawn** (HeteroFL" in page
    assert (Path(__file__).parents[2] / "docs" / "results" / "README.md").read_text() == page


def test_a_run_is_written_down_with_what_it_was(tmp_path: Path) -> None:
    record = run_arm("paper/x", Federated("tiny", TINY), "smoke", 3, tmp_path, lambda _: None)

    assert read_record(tmp_path) == record
    assert record.settings["federation.seed"] == 3 and record.settings["model.name"] == "mlp"
    assert record.data.startswith("digits") or "igits" in record.data
    assert record.found.figures["up_mb"] > 0 and len(record.found.lines["accuracy"]) == 2
    assert record.machine["processor"] and record.seconds > 0


@pytest.mark.slow
def test_a_run_that_goes_on_counts_the_rounds_before(tmp_path: Path) -> None:
    whole = run_arm("paper/x", Federated("tiny", TINY), "smoke", 3, tmp_path, lambda _: None)
    (tmp_path / "record.json").unlink()
    again = run_arm("paper/x", Federated("tiny", TINY), "smoke", 3, tmp_path, lambda _: None)
    rows = [json.loads(line) for line in (tmp_path / "simulation/rounds.jsonl").read_text().splitlines()]

    assert again.found == whole.found and again.seconds >= round(sum(row["seconds"] for row in rows), 2)


@pytest.mark.slow
def test_a_campaign_runs_what_is_not_there_and_keeps_what_is(tmp_path: Path) -> None:
    wanted = tasks(ENTRIES["fafed/counterexample"], "smoke", 1, tmp_path)
    (first,) = campaign(wanted, jobs=1)
    kept: list[bool] = []
    (again,) = campaign(wanted, tell=lambda told: kept.append(told.kept))
    assert again == first and kept == [True]


def test_a_papers_name_stands_for_all_of_its_own() -> None:
    own = [name for name in ENTRIES if name.startswith("fafed/")]
    assert [entry.name for entry in selected(["fafed"])] == own
    with refuses(ConfigError, name="nothing"):
        selected(["nothing"])


# -- every entry at every scale ----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ENTRIES)
def test_arms_are_federations_with_names_of_their_own(name: str, scale: Scale) -> None:
    arms = ENTRIES[name].arms(scale)
    assert arms and len({arm.name for arm in arms}) == len(arms)
    for arm in arms:
        if isinstance(arm, Federated):
            made = load_federation(None, {**arm.settings, "federation.seed": 0})
            clients = sum(tier.count for tier in made.tiers.values())
            chosen = made.round.fraction * clients
            assert chosen == pytest.approx(round(chosen))
            assert made.federation.rounds % (made.simulation.keep_every or 1) == 0
            assert clients in (16, 128) or not name.startswith("embracingfl/")
            sizes = {tier.gamma for tier in made.tiers.values()}
            assert len(sizes) == len(made.tiers) or not name.startswith("fiarse/")


class _Figures(dict[str, float]):
    """Has every figure."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> float:
        return 0.5


class _Lines(dict[str, list[tuple[float, float]]]):
    """Has every line."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> list[tuple[float, float]]:
        return [(1.0, 0.5), (2.0, 0.6)]


@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, scale) for name in ENTRIES for scale in SCALES if scale == "cpu" or name.startswith("fedbat/")],
)
def test_claims_find_their_figures(name: str, scale: Scale) -> None:
    entry = ENTRIES[name]
    arms = entry.arms(scale)
    if not any(isinstance(arm, Federated) for arm in arms):
        return
    names = [arm.name for arm in arms]
    results = Results(
        [0, 1], {arm: [_Figures()] * 2 for arm in names}, {arm: [_Lines()] * 2 for arm in names}
    )
    assert all(claim.judge(results).ours for claim in entry.claims)
    if entry.drawn is not None and name.startswith("fafed/"):
        assert all(text.startswith("<svg") for text in entry.drawn(results).values())


@pytest.mark.parametrize("name", ENTRIES)
def test_the_papers_numbers_are_those_of_arms(name: str) -> None:
    entry = ENTRIES[name]
    arms = {arm.name for arm in chain.from_iterable(entry.arms(scale) for scale in SCALES)}
    published: Mapping[str, Mapping[str, float]] = entry.published
    assert entry.claims and published.keys() <= arms
    for chart in entry.charts:
        assert set(chart.arms) <= arms or not chart.arms


@pytest.mark.slow
def test_entries_leave_their_pages_pictures_and_results(tmp_path: Path) -> None:
    """Those that need no dataset, computations and pictures of their own."""
    names = ("fafed/speedup", "fedbat/theory", "per_fedavg/theory", "embracingfl/theory")
    found = reproduce(names, tmp_path)

    assert [each.entry for each in found] == list(names)
    for summary in found:
        folder = tmp_path / summary.entry
        assert summary.claims and not summary.broken
        assert json.loads((folder / "results.json").read_bytes())["entry"] == summary.entry
        page = (folder / "README.md").read_text()
        assert summary.command in page
        for picture in folder.glob("*.svg"):
            assert f"({picture.name})" in page
            assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    overview = (tmp_path / "README.md").read_text()
    assert all(name in overview for name in names)


# -- ``python -m reproduce`` -------------------------------------------------------------------------------


NAME = "fafed/counterexample"
ROOT = Path(__file__).resolve().parents[2]
_WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('reproduce', run_name='__main__')"
)


def call(*arguments: str) -> Any:
    return runner().invoke(app, arguments)


def test_without_a_name_it_lists_what_there_is() -> None:
    assert NAME in call().stdout
    listed = json.loads(call("--json").stdout)
    assert [entry["name"] for entry in listed] == list(NAMES) and all(each["what"] for each in listed)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--help", 0, "--scale"),
        ("fafed/counterexmple", 2, "did you mean 'fafed/counterexample'?"),
        ("fafed --scale huge", 2, "no scale 'huge'; there are: smoke, cpu, paper"),
    ],
)
def test_help_and_a_wrong_word_need_no_torch(words: str, code: int, text: str) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert (ran.returncode, text in ran.stdout + ran.stderr) == (code, True), ran.stderr


def test_the_counter_example_agrees_with_the_spec_and_leaves_its_charts(tmp_path: Path) -> None:
    answer = call(NAME, "--out", str(tmp_path), "--json")
    assert answer.exit_code == 0
    (found,) = json.loads(answer.stdout)
    assert len(found["claims"]) == 5 and all(claim["held"] for claim in found["claims"])
    (arm,) = found["arms"]
    assert arm["mean"]["naive, q=5: xbar, t=100"] == pytest.approx(arm["paper"]["naive, q=5: xbar, t=100"])
    charts = list((tmp_path / NAME).glob("*.svg"))
    assert len(charts) == 2
    for chart in charts:
        assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    assert NAME in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize(
    ("exact", "strict", "fails"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_what_does_not_hold_is_said_and_may_be_the_exit_code(
    capsys: pytest.CaptureFixture[str], as_json: bool, exact: bool, strict: bool, fails: bool
) -> None:
    claim = ClaimSummary(
        rank="H1", text="falls", paper="", ours="+1", held=False, confidence="", doubt="", exact=exact
    )
    summary = Summary(
        entry="paper/test",
        what="",
        scale="smoke",
        command="",
        seeds=[0],
        data=[],
        started="",
        seconds=1.0,
        machine={},
        arms=[],
        claims=[claim],
    )
    if fails:
        with pytest.raises(typer.Exit) as ended:
            conclude([summary], Path(), strict=strict, as_json=as_json)
        assert ended.value.exit_code == 1
    else:
        conclude([summary], Path(), strict=strict, as_json=as_json)
    said = capsys.readouterr().out
    assert json.loads(said)[0]["claims"][0]["held"] is False if as_json else "falls" in said


def test_every_expected_number_is_one_that_its_run_reaches() -> None:
    runs = [*counterexample._naive_runs(), *counterexample._fafed_runs(), *counterexample._fedavg_runs()]
    assert len({each.name for each in runs}) == len(runs)
    for each in runs:
        q = each.algorithm().phases[0].steps
        assert each.steps % q == 0
        assert each.known and all(known.at <= each.steps and known.at % q == 0 for known in each.known)


# -- the phone table ---------------------------------------------------------------------------------------


def times(weak: float = 20.0) -> list[DeviceTimes]:
    backward = {
        EMBRACING: dict(zip(TIERS, (100.0, 50.0, weak), strict=True)),
        WIDTH: dict(zip(TIERS, (100.0, 20.0, 5.0), strict=True)),
    }
    return [
        DeviceTimes("onnx", "resnet20", method, tier, 10.0, backward[method][tier])
        for method in backward
        for tier in TIERS
    ]


def judged(weak: float) -> list[Judged]:
    results = Results([0], {device.ARM: [device.figures(times(weak))]}, {device.ARM: [{}]})
    return [claim.judge(results) for claim in device.ENTRY.claims]


def test_ratios_stand_beside_the_papers() -> None:
    found, paper = device.figures(times()), device.published()

    weak, narrow = (
        f"onnx, resnet20, {name}: backward / strong"
        for name in ("EmbracingFL, weak", "width reduction, moderate")
    )
    assert (found[weak], round(paper[weak], 3)) == (0.2, 0.204)
    assert (found[narrow], round(paper[narrow], 3)) == (0.2, 0.754)


@pytest.mark.parametrize(
    ("weak", "held"), [(20.0, [True, True]), (26.0, [True, False]), (60.0, [False, False])]
)
def test_a_weak_tier_that_takes_too_long_is_no_claim_held(weak: float, held: list[bool]) -> None:
    assert [each.held for each in judged(weak)] == held

"""Every entry runs what it shows, its pages are those of its records, and the command repeats single cells."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from edgefl.api.federation import load_federation
from edgefl.errors import DataError, DivergedError
from reproduce.__main__ import app
from reproduce.catalog import ENTRIES, selected
from reproduce.entry import (
    DIVERGED,
    SCALES,
    ArmRun,
    Cell,
    Choice,
    Claim,
    Computed,
    Entry,
    Federated,
    Grid,
    Lead,
    Measurements,
    Results,
    grid,
)
from reproduce.pages import Comparison, EntryResults, overview, page, table
from reproduce.runs import Record, Task, add_records, fetch_data, read_records, results_of, run_arm
from tests.cli.runner import runner
from tests.needs import require_data
from tests.support.errors import ConfigError, refuses
from tests.wire.mqtt.events import wait_until

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "results"
WIDEST_CELL, LONGEST_OVERVIEW = 40, 45


class _Any(dict[str, Any]):
    """Mapping with a value for every key but :data:`DIVERGED`."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __contains__(self, key: object) -> bool:
        return key != DIVERGED

    def __missing__(self, key: str) -> Any:
        return self._value


def complete(entry: Entry) -> Results:
    """Return results in which every arm of a scale has every figure and curve."""
    found = Measurements(_Any(0.5), _Any([(1.0, 0.5), (2.0, 0.6)]))
    names = {arm.name for scale in SCALES for arm in entry.arms(scale)}
    return Results({name: {seed: found for seed in range(5)} for name in names})


@pytest.mark.parametrize("name", ENTRIES)
def test_arms_have_names_of_their_own_and_are_federations(name: str) -> None:
    for scale in SCALES:
        arms = ENTRIES[name].arms(scale)
        assert len({arm.name for arm in arms}) == len(arms)
        for arm in arms:
            if isinstance(arm, Federated) and not ENTRIES[name].shares:
                made = load_federation(None, {**arm.settings, "federation.seed": 0})
                chosen = made.round.fraction * sum(tier.count for tier in made.tiers.values())
                assert chosen == pytest.approx(round(chosen)), arm.name


@pytest.mark.parametrize("name", ENTRIES)
def test_claims_cells_and_charts_refer_to_arms(name: str) -> None:
    entry, results = ENTRIES[name], complete(ENTRIES[name])
    known = set(results.runs)
    if not known:
        assert entry.needs
        return
    for claim in entry.claims:
        assert all(len(contrast(results)) == 5 for contrast in claim.parts), claim.text
    cells = [cell for grid in entry.grids for cell in grid.cells]
    assert not cells or any(cell.arm in known for cell in cells)
    assert all(cell.arm in known or entry.needs for cell in cells), {c.arm for c in cells} - known
    assert all(set(chart.arms) <= known for chart in entry.charts)
    assert entry.needs[:1] == entry.needs[:1].upper()
    if entry.shares:
        for scale in SCALES:
            whole = {arm.name: arm.settings for arm in ENTRIES[entry.shares].arms(scale)}
            assert {arm.name: arm.settings for arm in entry.arms(scale)}.items() <= whole.items()
    for choice in entry.choices:
        assert set(choice.candidates.values()) <= known and choice.of(results) in choice.candidates


def cells(written: str) -> list[str]:
    """Return the cells of all tables as a reader sees them."""
    rows = [line for line in written.splitlines() if line.startswith("|") and not line.startswith("|--")]
    found = [html.unescape(cell.strip()) for row in rows for cell in row.strip("|").split("|")]
    return [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell) for cell in found]


@pytest.mark.parametrize("name", ENTRIES)
def test_published_pages_are_those_of_their_records(name: str) -> None:
    found = EntryResults(ENTRIES[name], PUBLISHED)
    written = (PUBLISHED / f"{name}.md").read_text()
    pictures = [line[2:].partition("]")[0] for line in written.splitlines() if line.startswith("![")]

    assert written == page(found, pictures)
    assert found.command in written or not found.records
    assert max(map(len, cells(written)), default=0) <= WIDEST_CELL
    for picture in pictures:
        assert ElementTree.parse((PUBLISHED / name).parent / picture).getroot().tag.endswith("svg")
    records = (
        (PUBLISHED / f"{name}.jsonl").read_bytes().splitlines()
        if (PUBLISHED / f"{name}.jsonl").exists()
        else []
    )
    assert ENTRIES[name].shares or len(records) == len(read_records(ENTRIES[name], PUBLISHED)), (
        "records of other settings"
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_no_two_arms_have_equal_figures(name: str) -> None:
    """Table 9 of EmbracingFL once compared a norm with itself: both arms were measured alike."""
    records = read_records(ENTRIES[name], PUBLISHED)
    runs: dict[tuple[str, int], list[Record]] = {(each.scale, each.seed): [] for each in records}
    for each in records:
        runs[each.scale, each.seed].append(each)
    for one, other in (pair for group in runs.values() for pair in combinations(group, 2)):
        shared = one.figures.keys() & other.figures.keys() - {"up_mb", DIVERGED}
        alike = shared and all(one.figures[key] == other.figures[key] for key in shared)
        assert not alike, f"{one.label} and {other.arm}"


def test_the_overview_fits_a_screen() -> None:
    written = (PUBLISHED / "README.md").read_text()

    assert written == overview(list(ENTRIES.values()), PUBLISHED)
    lines = written.splitlines()
    assert len(lines) <= LONGEST_OVERVIEW
    assert max(map(len, cells(written))) <= WIDEST_CELL


def test_the_overview_has_the_hours_of_all_runs_of_a_row() -> None:
    rows = [
        line
        for line in (PUBLISHED / "README.md").read_text().splitlines()
        if "(embracingfl/table6.md)" in line
    ]

    assert [row.split("|")[-2].strip() for row in rows] == [
        EntryResults(ENTRIES["embracingfl/table6"], PUBLISHED).hours
    ]


# -- records -----------------------------------------------------------------------------------------------


TINY = {
    "model.name": "mlp",
    "data.name": "digits",
    "federation.rounds": 2,
    "data.train_samples": 200,
    "data.test_samples": 50,
    "tiers": {"strong": {"count": 2, "devices": ["strong-*"]}},
}
ONE = Computed(
    "one", lambda run: Measurements({"x": 0.25 + run.seed / 4}, {"l": [(1.0, 0.5), (2.0, 0.75)]}), {"k": 1}
)
ENTRY = Entry(
    name="paper/table",
    title="Table 9: a table",
    arms=lambda _: [ONE],
    grids=(grid("method", ["x"], {"one": [50.0]}, lambda row, column: (row, column)),),
)


def task(arm: str = "one", seed: int = 0) -> Task:
    return Task(entry="paper/table", arm=arm, scale="smoke", seed=seed)


def recorded(folder: Path, seeds: int = 2) -> list[Record]:
    return [run_arm(task(seed=seed), ONE, folder) for seed in range(seeds)]


def test_a_run_is_written_down_with_what_it_was(tmp_path: Path) -> None:
    record = run_arm(task("tiny", 3), Federated("tiny", TINY), tmp_path)

    assert record.seed == 3 and record.settings["model.name"] == "mlp" and "igits" in record.data
    assert record.figures["up_mb"] > 0 and len(record.lines["accuracy"]) == 2
    assert record.processor and record.version and record.cpu_seconds > 0


def test_an_arm_that_diverges_is_recorded_and_not_chosen(tmp_path: Path) -> None:
    def diverge(_: ArmRun) -> Measurements:
        raise DivergedError("expected finite updates, found none")

    record = run_arm(task("large"), Computed("large", diverge), tmp_path)
    found = results_of([record, *recorded(tmp_path, 1)])

    choice = Choice("step", {"0.1": "large", "0.01": "one"}, "x")
    assert found.diverged("large") and choice.of(found) == "0.01"
    shown = table(Grid("step", ["x"], {"0.1": [Cell("large", "x", 0.5)]}), found)
    assert shown.endswith("\n| 0.1 | diverged (0.5) |")


def test_records_of_other_settings_do_not_count(tmp_path: Path) -> None:
    add_records(recorded(tmp_path), ENTRY, tmp_path)
    assert len(read_records(ENTRY, tmp_path)) == 2

    other = Entry(name="paper/table", title="", arms=lambda _: [Computed("one", ONE.compute, {"k": 2})])
    assert read_records(other, tmp_path) == []


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    add_records(recorded(tmp_path), ENTRY, tmp_path)
    path = tmp_path / "paper" / "table.jsonl"
    path.write_bytes(path.read_bytes()[:-9])

    with refuses(ConfigError, path=str(path)):
        read_records(ENTRY, tmp_path)


def test_a_cell_has_mean_deviation_and_the_papers_number(tmp_path: Path) -> None:
    add_records(recorded(tmp_path), ENTRY, tmp_path)
    found = EntryResults(ENTRY, tmp_path)

    assert table(ENTRY.grids[0], found.results).endswith("\n| one | 37.50 ± 17.68 (50) |")
    assert "python -m reproduce paper/table --scale smoke --seeds 0,1" in page(found)
    assert "| one | - (50) |" in page(EntryResults(ENTRY, tmp_path / "none"))


def test_new_seeds_are_compared_with_published_runs(tmp_path: Path) -> None:
    add_records(recorded(tmp_path), ENTRY, tmp_path)

    (near,) = Comparison(ENTRY, [run_arm(task(seed=2), ONE, tmp_path)], tmp_path).cells()
    (far,) = Comparison(ENTRY, [run_arm(task(seed=40), ONE, tmp_path)], tmp_path).cells()

    assert near["inside"] and not far["inside"] and near["value"] == 75.0
    assert near["published"] == "37.50 ± 17.68"


def test_runs_of_published_seeds_are_compared_figure_by_figure(tmp_path: Path) -> None:
    add_records(recorded(tmp_path), ENTRY, tmp_path)
    again = run_arm(task(seed=1), ONE, tmp_path)
    other = msgspec.structs.replace(again, figures={"x": 0.0}, processor="another")

    assert Comparison(ENTRY, [again], tmp_path).cells() == []
    equal = "1 of 1 runs with published seeds have the published figures"
    assert Comparison(ENTRY, [again], tmp_path).remarks() == [equal]
    assert Comparison(ENTRY, [msgspec.structs.replace(again, processor="another")], tmp_path).remarks() == [
        equal
    ]
    assert Comparison(ENTRY, [again, other, run_arm(task(seed=40), ONE, tmp_path)], tmp_path).remarks() == [
        "1 of 2 runs with published seeds have the published figures",
        f"1 of the others ran on another processor: published {again.processor}, here another",
    ]
    assert Comparison(ENTRY, [], tmp_path).remarks() == []


def test_runs_on_other_data_are_not_compared(tmp_path: Path) -> None:
    add_records([msgspec.structs.replace(each, data="half") for each in recorded(tmp_path)], ENTRY, tmp_path)
    new = [msgspec.structs.replace(run_arm(task(seed=2), ONE, tmp_path), data="all")]

    found = Comparison(ENTRY, new, tmp_path)
    assert found.cells() == []
    assert found.remarks() == ["not compared, because of other data: 1 of the runs; published half, here all"]


@pytest.mark.parametrize(
    ("seeds", "yours", "answer"),
    [(5, 1.0, "reproduced"), (5, -1.0, "contradicted"), (4, 1.0, "inconclusive"), (0, 1.0, None)],
)
def test_claims_are_judged_by_new_seeds_alone(
    tmp_path: Path, seeds: int, yours: float, answer: str | None
) -> None:
    """The published seeds, of which the new runs hold copies, reproduce the claim."""
    arms = [Computed(name, lambda run: Measurements({})) for name in ("one", "other")]
    claims = (Claim("one is ahead", Lead("one", "other", "x")),)
    entry = Entry(name="paper/table", title="Table 9: a table", arms=lambda _: arms, claims=claims)

    def runs(first: int, count: int, lead: float) -> list[Record]:
        leads = {seed: lead + seed % 5 / 50 for seed in range(first, first + count)}
        return [
            Record(
                entry=entry.name,
                arm=arm,
                scale="cpu",
                seed=seed,
                settings={},
                figures={"x": sign * each / 2},
            )
            for seed, each in leads.items()
            for arm, sign in (("one", 1), ("other", -1))
        ]

    published = runs(0, 5, 1.0)
    add_records(published, entry, tmp_path)
    found = Comparison(entry, published + runs(20, seeds, yours), tmp_path).claims()
    assert [(row["published"], row["yours"]) for row in found] == ([("reproduced", answer)] if answer else [])
    of_one_arm = [each for each in runs(20, seeds, yours) if each.arm == "one"]
    assert Comparison(entry, of_one_arm, tmp_path).claims() == []
    on_other_data = [msgspec.structs.replace(each, data="other") for each in runs(20, seeds, yours)]
    assert Comparison(entry, on_other_data, tmp_path).claims() == []
    of_another_scale = [msgspec.structs.replace(each, scale="smoke") for each in runs(20, seeds, yours)]
    assert Comparison(entry, of_another_scale, tmp_path).claims() == []


# -- ``python -m reproduce`` -------------------------------------------------------------------------------


def call(*arguments: str) -> Any:
    return runner().invoke(app, arguments)


def test_without_a_name_it_lists_what_there_is() -> None:
    listed = json.loads(call("--json").stdout)
    assert [entry["name"] for entry in listed] == list(ENTRIES) and all(each["title"] for each in listed)
    assert [entry.name for entry in selected(["fafed"])] == [
        name for name in ENTRIES if name.startswith("fafed/")
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("per_fedavg/tabel1", "did you mean 'per_fedavg/table1'?"),
        ("per_fedavg/table2 --seeds 1,x", "expected seeds like 3,4,5, found '1,x'"),
        ("per_fedavg/table2 --arm no", "expected names of arms, found no; there are: partition"),
    ],
)
def test_a_wrong_word_is_named(tmp_path: Path, words: str, text: str) -> None:
    answer = call(*words.split(), "--out", str(tmp_path))
    assert answer.exit_code != 0 and text in str(answer.exception) + answer.output


def test_missing_data_are_named_with_a_remedy_of_this_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgefl.data.datasets.places", lambda _: [tmp_path])
    with refuses(ConfigError, arm="tiny") as refused:
        run_arm(task("tiny"), Federated("tiny", {**TINY, "data.name": "mnist"}), tmp_path)
    assert re.fullmatch(
        r"MNIST was not found in .*EDGEFL_DATA.*`python -m reproduce data`.*", str(refused.value)
    )


def test_data_are_downloaded_once_and_what_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_data(federation: Any) -> Any:
        opened.append(federation.data)
        if federation.data.name == "mnist":
            raise DataError("", dataset="MNIST", searched="no folder")
        return federation.data

    monkeypatch.setattr("edgefl.setup.data.open_data", open_data)
    arms = [Federated("tiny", TINY), Federated("other", {**TINY, "algorithm.lr": 0.5}), ONE]
    assert fetch_data(arms) == ["digits"] and all(each.download for each in opened)
    with refuses(ConfigError):
        fetch_data([Federated("lacking", {**TINY, "data.name": "mnist"}), *arms])
    assert [each.name for each in opened] == ["digits", "mnist", "digits"]


def test_a_stopped_run_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    require_data("mnist")
    command = [
        *(
            sys.executable,
            "-m",
            "reproduce",
            "per_fedavg/table1",
            "--arm",
            "MNIST, tau=4, alpha=0.01: FO",
        ),
        *("--seeds", "5", "--jobs", "1", "--out", str(tmp_path)),
    ]
    ran = subprocess.run(
        [*command, "--minutes", "0.001"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ran.returncode == 0 and "the same command resumes the runs" in ran.stderr, ran.stderr
    assert not (tmp_path / "per_fedavg" / "table1.jsonl").exists()

    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    wait_until(lambda: bool(list(tmp_path.rglob("rounds.jsonl"))), "the first round")
    process.kill()
    process.communicate(timeout=60)  # the run's process ends, too, and closes the pipe
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)

    assert ended.returncode == 0, ended.stderr
    (line,) = (tmp_path / "per_fedavg" / "table1.jsonl").read_text().splitlines()
    assert json.loads(line)["seed"] == 5 and not list(tmp_path.rglob("rounds.jsonl"))

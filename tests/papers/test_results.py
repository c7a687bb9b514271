"""Claims are judged by paired seeds, and tables say what was found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgefl.errors import ConfigError
from reproduce.campaign import ENTRIES, campaign, selected, tasks
from reproduce.entry import Claim, Column, Computed, Entry, Federated, Measurements, percent
from reproduce.page import overview, summaries, write_entry
from reproduce.record import Record, read_record, run_arm, summed_up
from reproduce.results import Results, above, ahead_of_each, not_below, ordered
from reproduce.withdrawn import _TABLE, ERRORS, withdrawn

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
    with pytest.raises(ConfigError, match="no figure 'y' of arm 'a'"):
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
    with pytest.raises(ConfigError, match="no reproduction 'nothing'; there are: "):
        selected(["nothing"])

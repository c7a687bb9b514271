"""Which slow tests a change asks for."""

from __future__ import annotations

from pathlib import Path

from tests.rings.changed import changed_rooms, chosen
from tests.rings.importing import turned
from tests.rings.record import FileTimes, FullRun, by_folder, longest_first
from tests.rings.samples import spread


def test_a_changed_room_asks_for_its_mirror_and_for_what_else_looks_at_it() -> None:
    assert changed_rooms(["exporters/edgefl_export/onnx/ops.py"]) == [
        "tests/exporters",
        "tests/parity",
        "tests/web",
    ]
    assert changed_rooms(["reproduce/pages.py"]) == ["tests/papers", "tests/invariants"]
    assert changed_rooms(["edgefl/wire/bits.py", "README.md"]) == ["tests/wire", "tests/e2e"]
    assert changed_rooms(["tests/server/updates/test_reassembly.py", "docs/testing.md"]) == ["tests/server"]
    assert changed_rooms(["tests/server/updates/test_reassembly.py", "tests/conftest.py"]) == ["tests"]


def test_the_budget_takes_the_quickest_and_names_what_it_leaves_out() -> None:
    here = "tests/rings/test_rings.py"
    run = FullRun(
        commit="0" * 40,
        date="2026-01-01",
        machine="any",
        wall_seconds=1.0,
        files={
            here: FileTimes(tests=1, slow_tests=1, slow_seconds=4.0),
            "tests/conftest.py": FileTimes(tests=1, slow_tests=1, slow_seconds=5.0),
            "tests/rings/__init__.py": FileTimes(tests=9, slow_seconds=0.0),
            "tests/gone/test_gone.py": FileTimes(tests=1, slow_tests=1, slow_seconds=1.0),
        },
    )
    assert chosen(run, ["tests"], 9.0) == ([here, "tests/conftest.py"], [])
    assert chosen(run, ["tests"], 8.0) == ([here], ["tests/conftest.py"])
    assert chosen(run, ["tests/rings"], 8.0) == ([here], [])


def test_a_sample_is_spread_over_the_rows() -> None:
    assert spread(9, 3) == {0, 4, 8}
    assert spread(2, 3) == {0, 1} and spread(5, 1) == {0}
    assert all(len(spread(count, most)) == min(count, most) for count in range(9) for most in range(1, 9))


def test_a_table_sums_files_by_room() -> None:
    files = {
        "tests/wire/mqtt/test_topics.py": FileTimes(tests=2, seconds=1.0),
        "tests/wire/test_bits.py": FileTimes(tests=3, slow_tests=1, seconds=2.0, slow_seconds=4.0),
    }
    run = FullRun(commit="0" * 40, date="2026-01-01", machine="any", wall_seconds=1.0, files=files)
    assert "| tests/wire | 5 | 3 | 1 | 4 |" in by_folder(run)


def test_long_files_come_first_and_stay_whole_by_the_tests_that_run() -> None:
    class Item:
        def __init__(self, nodeid: str, *keywords: str) -> None:
            self.nodeid, self.keywords = nodeid, keywords

    files = {"a.py": FileTimes(seconds=2.0), "b.py": FileTimes(seconds=1.0, slow_seconds=5.0)}
    run = FullRun(commit="", date="", machine="", wall_seconds=1.0, files=files)

    def order(*items: Item) -> list[str]:
        listed = list(items)
        longest_first(listed, run)  # type: ignore[arg-type]
        return [item.nodeid for item in listed]

    quick = (Item("b.py::1"), Item("a.py::1"), Item("new.py::1"), Item("a.py::2"))
    assert order(*quick) == ["new.py::1", "a.py::1", "a.py::2", "b.py::1"]
    assert order(*quick, Item("b.py::2", "slow"))[:3] == ["new.py::1", "b.py::1", "b.py::2"]


def test_processes_begin_to_import_at_different_places_and_import_all() -> None:
    names = list("abcdefg")
    orders = [turned(names, number, 3) for number in range(3)]
    assert [order[0] for order in orders] == ["a", "c", "e"]
    assert all(sorted(order) == names for order in orders)


def test_a_recorded_file_that_exists_is_not_taken_for_a_test() -> None:
    # Before pytest knows the option it looks at each word alone, and at no folder's conftest once one is a file.
    recipes = Path("Makefile").read_text()
    assert recipes.count("--record=") == 2
    assert "--record " not in recipes

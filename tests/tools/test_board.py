"""Tests of `make board`: its comparison of values, and its errors on a machine that lacks something."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from tools.board import equality, root
from tools.board.equality import EqualityItem, compare_item
from tools.board.values import drawn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "arm64.md"


def compared(folder: Path, item: EqualityItem, change: float) -> tuple[dict[str, object], list[str]]:
    """Compare an array with itself plus ``change`` in its first entry."""
    x = drawn("x", (4, 3), "float32")
    for name, more in (("here", 0.0), ("board", change)):
        (folder / name / "part").mkdir(parents=True)
        y = x.copy()
        y[0, 0] += more
        save_file({"x": x, "y": y}, folder / name / "part" / "a.safetensors")
    return compare_item(item, folder / "board", folder / "here")


@pytest.mark.parametrize(("exact", "change", "accepted"), [
    (True, 0.0, True), (True, 1e-6, False), (False, 1e-6, True), (False, 1e-3, False), (False, float("nan"), False),
])  # fmt: skip
def test_values_are_compared_to_the_bit_or_a_tolerance(
    tmp_path: Path, exact: bool, change: float, accepted: bool
) -> None:
    row, problems = compared(tmp_path, EqualityItem("thing", exact, "part/*"), change)

    assert row["arrays"] == 2 and row["equal"] == (2 if change == 0.0 else 1)
    assert not problems if accepted else problems[0].startswith("thing: y of part/a.safetensors: ")


def test_values_that_are_missing_are_a_problem(tmp_path: Path) -> None:
    _, none = compare_item(EqualityItem("thing", True, "part/*"), tmp_path, tmp_path)
    _, problems = compared(tmp_path, EqualityItem("thing", True, "part/*"), 0.0)
    (tmp_path / "board" / "part" / "a.safetensors").unlink()
    _, lost = compare_item(EqualityItem("thing", True, "part/*"), tmp_path / "board", tmp_path / "here")

    assert none == ["thing: no values"] and problems == [] and "holds [] on the board" in lost[0]


def test_the_page_lists_each_item_with_its_equality() -> None:
    rows = re.findall(r"^\| `([a-z ]+)` \|[^|]+\| (to the bit|within)", PAGE.read_text(), re.MULTILINE)

    assert rows == [(item.name, "to the bit" if item.exact else "within") for item in equality.ITEMS]


def test_a_machine_that_lacks_everything_is_told_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root, "find_program", lambda _: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    with pytest.raises(root.BoardError) as caught:
        root.check_machine()

    lines = str(caught.value).splitlines()
    assert lines[0].startswith("expected root ")
    assert {line.rpartition(" ")[2] for line in lines[1:]} >= {"mmdebstrap", "qemu-user-static", "mosquitto"}


def test_the_machine_of_a_program_is_read_from_its_head(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n" + 30 * "#")

    assert root.elf_machine(script) == 0
    if sys.platform == "linux":
        assert root.elf_machine(Path(sys.executable).resolve()) > 0
    assert int.from_bytes(root.ELF[18:20], "little") == 183

"""Every numbered invariant of the papers has a test that runs by default.

Names tell: ``test_i5_...``, ``test_inv05_...``, ``test_05_...``, and of several ``test_02_03_04_...``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TypeGuard

import pytest

HERE = Path(__file__).parent
# The invariants of each paper's list.
NUMBERED = {
    "embracingfl": set(range(1, 21)),
    "fafed": set(range(1, 24)),
    "fedbat": set(range(1, 27)),
    "fiarse": set(range(1, 33)),
    "per_fedavg": set(range(1, 36)),
}
NAME = re.compile(r"test_(?:i|inv)?(?P<numbers>\d+(?:_\d+)*)_")


def numbers(name: str) -> set[int]:
    """The invariants that a test's name tells of."""
    match = NAME.match(name)
    return {int(number) for number in match["numbers"].split("_")} if match else set()


def is_slow(node: ast.AST) -> bool:
    """Whether this is the mark itself, not a row of parameters that has it."""
    return ast.unparse(node) == "pytest.mark.slow"


def is_assigned(node: ast.stmt, name: str) -> TypeGuard[ast.Assign]:
    """Whether this gives ``name`` a value."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name


def by_default(source: str) -> set[int]:
    """The invariants of a test file, without the tests that are slow as a whole."""
    module = ast.parse(source)
    marks = (node.value for node in module.body if is_assigned(node, "pytestmark"))
    if any(is_slow(each) for mark in marks for each in ast.walk(mark)):
        return set()
    tests = (node for node in module.body if isinstance(node, ast.FunctionDef))
    return {
        number
        for test in tests
        if not any(is_slow(mark) for mark in test.decorator_list)
        for number in numbers(test.name)
    }


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_numbered_invariant_has_a_test_by_default(paper: str) -> None:
    covered = set[int]().union(*(by_default(file.read_text()) for file in (HERE / paper).glob("test_*.py")))

    assert covered == NUMBERED[paper]


def test_the_papers_are_the_folders() -> None:
    assert {file.parent.name for file in HERE.glob("*/test_*.py")} == set(NUMBERED)


def test_numbers_are_read_from_names_and_slow_tests_do_not_count() -> None:
    assert numbers("test_02_03_04_fail_for_a_private_preconditioner") == {2, 3, 4}
    assert numbers("test_i8_widths_of_table_10") == {8}
    assert numbers("test_inv05_neither_scale_nor_sign") == {5}
    assert numbers("test_r5_a_round") == numbers("test_guard_relative") == set()
    assert by_default("def test_i1_a(): ...\n@pytest.mark.slow\ndef test_i2_a(): ...") == {1}
    assert by_default("pytestmark = pytest.mark.slow\ndef test_i1_a(): ...") == set()
    assert by_default("pytestmark = [pytest.mark.e2e, pytest.mark.slow]\ndef test_i1_a(): ...") == set()

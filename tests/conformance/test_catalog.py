"""The cases, and the document that lists them."""

from __future__ import annotations

import json
import re
from collections import Counter

from edgefl_conformance import command as check
from edgefl_conformance.catalog import CASES, GROUPS, chosen
from edgefl_conformance.command import app
from tests.cli.runner import runner
from tests.conformance.table import table
from tests.docs.documents import DOCS

PAGE = (DOCS / "conformance.md").read_text()


def test_every_case_has_a_name_of_its_own_and_one_sentence() -> None:
    assert [name for name, count in Counter(case.name for case in CASES).items() if count > 1] == []
    assert [case.says for case in CASES if not case.says.endswith(".") or case.says.count(". ") > 0] == []
    assert len({group.name for group in GROUPS}) == len(GROUPS)
    assert not {case.name for case in CASES} & {group.name for group in GROUPS}


def test_the_document_lists_the_cases() -> None:
    """``python -m tests.conformance.table`` prints the table."""
    assert table() in PAGE


def test_cases_are_chosen_by_name_group_and_pattern() -> None:
    assert [case.name for case in chosen(("killed-*", "plain-round"))][:1] == ["plain-round"]
    assert {case.group for case in chosen(("trust",))} == {"trust"}
    assert chosen() == CASES


def test_the_command_lists_them() -> None:
    rows = json.loads(runner().invoke(app, ["cases", "--json"]).stdout)

    assert [row["case"] for row in rows] == [case.name for case in CASES]
    assert {row["case"] for row in rows if row["optional"]} == {
        "progress",
        "offer",
        "pages",
        "mirrors",
        "profile",
    }


def test_examples_name_cases_that_are_there() -> None:
    named = re.findall(r"--only (\S+)", str(check.run.__doc__) + PAGE)

    assert len(named) >= 3
    assert all(chosen((name,)) for name in named)

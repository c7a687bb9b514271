"""When an update is the expected one."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter

import msgspec
import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.mqtt.messages import ResourceUsage, Update, encode
from edgefl_conformance import command as check
from edgefl_conformance.catalog import CASES, GROUPS, chosen
from edgefl_conformance.command import app
from edgefl_conformance.material.compare import Tolerance, check_array, check_fields, check_update
from edgefl_conformance.results import CaseFailed
from edgefl_device.round.trainer import RoundResult
from tests.cli.runner import runner
from tests.conformance.table import table
from tests.docs.documents import DOCS

WANTED = RoundResult(
    update={"w": np.array([0.5, -0.25], np.float32), "codes": np.arange(100, dtype=np.uint8)},
    masks={},
    carry={},
    metrics={"loss": 1.25},
    samples=21,
)
PROFILE = ResourceUsage(
    step_ms=0, forward_ms=0, load_ms=0, idle_bytes=0, peak_bytes=0, down_bytes=0, down_wire_bytes=0
)


def update(**changes: object) -> Update:
    arrays = changes.pop("arrays", WANTED.update)
    fields = dict(
        run="r",
        round=1,
        device="d",
        nonce="0011",
        tier="t",
        model_version="0",
        samples=21,
        metrics={"loss": 1.25},
    )
    fields |= {"profile": PROFILE, "codec": "dense", "codec_version": 1, "tensors": tensors.dump(arrays)}  # type: ignore[arg-type]
    return Update(**{**fields, **changes})  # type: ignore[arg-type]


def test_what_rounding_leaves_is_taken() -> None:
    near = {"w": WANTED.update["w"] + np.float32(1e-6), "codes": WANTED.update["codes"].copy()}
    near["codes"][7] += 1

    check_update(update(arrays=near, metrics={"loss": 1.2501}), WANTED, Tolerance())


def test_of_few_codes_one_may_have_fallen_to_the_other_side_and_no_two() -> None:
    codes = np.zeros(42, np.uint8)
    one, two = codes.copy(), codes.copy()
    one[3], two[3:5] = 1, 1

    check_array("codes", codes, one, Tolerance())
    with pytest.raises(CaseFailed, match="of which at most 2% differ, or one; found 2 of 42"):
        check_array("codes", codes, two, Tolerance())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"samples": 20}, "update.samples 21; found 20"),
        ({"metrics": {}}, r"metrics \['loss'\]"),
        ({"metrics": {"loss": 1.3}}, "metric loss = 1.25; found 1.3"),
        ({"metrics": {"loss": float("nan")}}, "metric loss = 1.25; found nan"),
        ({"arrays": {"w": WANTED.update["w"]}}, r"tensors of the update \['codes', 'w'\]"),
        ({"arrays": {**WANTED.update, "w": np.array([0.5, -0.2501], np.float32)}}, r"w\[1\] = -0.25 "),
        ({"arrays": {**WANTED.update, "w": np.array([0.5, np.nan], np.float32)}}, r"w\[1\] = -0.25 "),
        ({"arrays": {**WANTED.update, "w": WANTED.update["w"].astype(np.float64)}}, "dtype of w 'float32'"),
        ({"arrays": {**WANTED.update, "w": WANTED.update["w"][:, None]}}, r"shape of w \(2,\)"),
        ({"arrays": {**WANTED.update, "codes": WANTED.update["codes"][::-1].copy()}}, "found 100 of 100"),
        ({"tensors": b"no tensors"}, "tensors in safetensors"),
    ],
)
def test_what_is_no_rounding_is_told(changes: dict[str, object], told: str) -> None:
    with pytest.raises(CaseFailed, match=told):
        check_update(update(**changes), WANTED, Tolerance())


def test_a_field_that_the_protocol_has_not_is_told() -> None:
    check_fields(encode(update()))
    fields = msgspec.msgpack.decode(encode(update()))
    fields["profile"]["battery"] = 3

    with pytest.raises(CaseFailed, match="no field in its profile"):
        check_fields(msgspec.msgpack.encode(fields))


def test_the_tolerance_is_that_of_the_document() -> None:
    assert dataclasses.astuple(Tolerance()) == (1e-5, 1e-4, 1e-3, 0.02)


# -- the cases, and the document that lists them -----------------------------------------------------------


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
        "carry-of-another-tier",
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

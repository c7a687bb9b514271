"""Codes of floats that lie on a threshold: excused by rounding, within measure, and told in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ExportError
from edgefl_export.verify.graphs import CEILING, Run, compare
from edgefl_export.verify.rounding import Array

SIZE = 10_000
CODES = Function(
    "codes",
    lambda given: {"update.codes": torch.floor(given["weights.x"] * 2**14).remainder(2).to(torch.uint8)},
    {"weights.x": TensorSpec((SIZE,))},
)


def flipping(count: int) -> Run:
    """A runtime that gives so many other codes than torch."""

    def run(arrays: Mapping[str, Array]) -> Sequence[Array]:
        found = (
            CODES({"weights.x": torch.from_numpy(np.asarray(arrays["weights.x"]))})["update.codes"]
            .numpy()
            .copy()
        )
        found[:count] ^= 1
        return [found]

    return run


def test_codes_that_rounding_excuses_are_told_with_how_far_torch_strays() -> None:
    report = compare(CODES, flipping(3), seed=1)
    assert report.errors == {"update.codes": 3 / SIZE}
    assert 1.5 / SIZE <= report.rounding["update.codes"] <= CEILING
    assert report.set_aside, "other examples were tried for one that does without"


def test_codes_that_agree_need_no_excuse() -> None:
    report = compare(CODES, flipping(0), seed=1)
    assert report.errors == {"update.codes": 0.0} and not report.rounding and not report.set_aside


def test_more_codes_than_rounding_moves_are_refused() -> None:
    with pytest.raises(ExportError, match="2000 whole numbers differ"):
        compare(CODES, flipping(2000), seed=1)

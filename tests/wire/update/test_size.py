"""Sizes that are told without making the bytes equal those of the bytes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.update.form import (
    DENSE,
    SIGNS,
    CodeEncoding,
    FloatEncoding,
    Form,
    Section,
    SparseEncoding,
    blob_bytes,
    float32_bytes,
    update_size,
)

SHAPES = {
    "a.weight": (3, 7, 1),
    "a.bias": (),
    "b.weight": (1000, 10),
    "norm.running_mean": (33,),
    "norm.gewöhnlich": (0, 4),
}
CODED = ("a.bias", "a.weight", "b.weight", "norm.gewöhnlich")
LEVELS = tuple(float(level) for level in range(8))


@pytest.mark.parametrize(
    "encoding",
    [
        CodeEncoding(1, SIGNS),
        CodeEncoding(3, LEVELS, 0.5),
        FloatEncoding(),
        FloatEncoding("float16"),
        FloatEncoding("bfloat16"),
        SparseEncoding(0.03),
    ],
    ids=str,
)
@pytest.mark.parametrize("statistics", [FloatEncoding(), CodeEncoding(3, LEVELS)], ids=str)
def test_the_size_of_a_coded_update_is_that_of_its_bytes(
    encoding: CodeEncoding | FloatEncoding | SparseEncoding, statistics: CodeEncoding | FloatEncoding
) -> None:
    own = {"norm.running_mean": 0} if isinstance(statistics, CodeEncoding) else {}
    sections = (
        Section(CODED, encoding, {name: number for number, name in enumerate(CODED)}),
        Section(("norm.running_mean",), statistics, own),
    )
    form = Form("test", 1, sections, change=True)
    entries = {name: math.prod(shape) for name, shape in SHAPES.items()}
    arrays = {name: np.zeros(length, dtype) for name, (dtype, length) in form.arrays(entries).items()}

    size = update_size(form, SHAPES, {"norm.running_mean"})

    assert size.nbytes == len(tensors.dump(arrays))
    assert sum(part.nbytes for part in size.parts) == sum(array.nbytes for array in arrays.values())
    assert [part.statistics for part in size.parts] == [False, True]
    assert size.statistics_bytes == size.parts[1].nbytes


def test_a_dense_update_takes_what_its_tensors_take() -> None:
    made = tensors.dump({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})

    size = update_size(DENSE, SHAPES, {"norm.running_mean"})

    assert size.nbytes == size.float32_bytes == float32_bytes(SHAPES) == len(made)
    assert size.ratio == 1
    assert [(part.tensors, part.entries, part.bits) for part in size.parts] == [(4, 10022, 32), (1, 33, 32)]
    assert size.statistics_bytes == 4 * 33


@pytest.mark.parametrize("tensors_in", [0, 1, 9, 10, 11, 100])
def test_the_header_of_a_blob_is_counted_with_its_padding(tensors_in: int) -> None:
    arrays = {f"t{number}": np.zeros(number, np.float32) for number in range(tensors_in)}
    told = {name: ("float32", array.shape) for name, array in arrays.items()}

    assert blob_bytes(told) == len(tensors.dump(arrays))


def test_the_payload_is_that_of_the_paper() -> None:
    sections = (Section(CODED, CodeEncoding(1, SIGNS), {name: number for number, name in enumerate(CODED)}),)
    size = update_size(Form("test", 1, sections, change=True), {name: SHAPES[name] for name in CODED})

    assert size.parts[0].nbytes == sum(math.ceil(math.prod(SHAPES[name]) / 8) + 4 for name in CODED)

"""The bytes of coded updates: golden vectors, the reader against a slower one, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.errors import ProtocolError
from edgefl.wire.regions import BlockRegion, EntryRegion, Region, local_shape
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.decode import decode, pack_codes, unpack_codes
from edgefl.wire.update.form import (
    DENSE,
    SIGNS,
    CodeEncoding,
    Encoding,
    FloatEncoding,
    Form,
    Section,
    SparseEncoding,
)
from edgefl_conformance.vectors.write import UPDATES as FOLDER

PACKED: list[dict[str, Any]] = json.loads((FOLDER / "codes.json").read_text())
UPDATES: dict[str, dict[str, Any]] = json.loads((FOLDER / "updates.json").read_text())


def encoding_of(told: dict[str, Any]) -> Encoding:
    if "codes" in told:
        return CodeEncoding(**{**told["codes"], "levels": tuple(told["codes"]["levels"])})
    return SparseEncoding(told["sparse"]) if "sparse" in told else FloatEncoding(told["values"])


def region_of(told: dict[str, Any] | None) -> Region:
    if told is None:
        return None
    if "axes" in told:
        return BlockRegion(tuple(None if axis is None else tuple(axis) for axis in told["axes"]))
    return EntryRegion(tuple(told["names"]), np.array(told["positions"]))


def golden_update(name: str) -> tuple[Form, Arrays, dict[str, Region], dict[str, tuple[int, ...]]]:
    told = UPDATES[name]
    form = told["form"]
    sections = tuple(
        Section(tuple(s["names"]), encoding_of(s), s.get("groups", {})) for s in form["sections"]
    )
    arrays = {
        name: np.frombuffer(bytes.fromhex(array["hex"]), array["dtype"])
        for name, array in told["arrays"].items()
    }
    regions = {name: region_of(region) for name, region in told["regions"].items()}
    shapes = {name: tuple(shape) for name, shape in told["shapes"].items()}
    return Form(form["codec"], form["version"], sections, form["change"]), arrays, regions, shapes


@pytest.mark.parametrize("vector", PACKED, ids=lambda vector: f"{vector['bits']} bits")
def test_codes_pack_to_their_golden_bytes_and_back(vector: dict[str, Any]) -> None:
    codes = np.array(vector["codes"], np.uint8)

    assert pack_codes(codes, vector["bits"]).tobytes().hex() == vector["hex"]
    packed = np.frombuffer(bytes.fromhex(vector["hex"]), np.uint8)
    assert unpack_codes(packed, vector["bits"], codes.size).tolist() == vector["codes"]


@pytest.mark.parametrize("name", UPDATES)
def test_golden_update_decodes_to_its_tensors(name: str) -> None:
    found = decode(*golden_update(name))

    assert found.keys() == UPDATES[name]["tensors"].keys()
    for tensor, expected in UPDATES[name]["tensors"].items():
        assert found[tensor].dtype == np.float32
        np.testing.assert_array_equal(found[tensor], np.array(expected, np.float32))  # shapes too


@pytest.mark.parametrize("name", UPDATES)
def test_golden_update_has_exactly_the_arrays_that_its_form_announces(name: str) -> None:
    form, arrays, regions, shapes = golden_update(name)
    sizes = {tensor: math.prod(local_shape(tensor, region, shapes)) for tensor, region in regions.items()}

    assert {key: (str(array.dtype), array.size) for key, array in arrays.items()} == form.arrays(sizes)


def test_i21_clients_of_100_and_300_samples_move_a_weight_by_an_eighth() -> None:
    few, many = (decode(*golden_update(f"one_bit_of_{n}_samples"))["a.weight"] for n in (100, 300))

    np.testing.assert_allclose(
        (100 * few.astype(np.float64) + 300 * many) / 400, np.full((3, 3), -0.125), rtol=1e-7
    )


@given(bits=st.integers(1, 8), count=st.integers(0, 70), seed=st.integers(0, 2**32 - 1))
def test_i20_codes_are_packed_into_the_fewest_whole_bytes(bits: int, count: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 2**bits, count).astype(np.uint8)

    packed = pack_codes(codes, bits)

    # As one integer, the lowest byte first, code j stands at bit j * bits.
    assert int.from_bytes(packed.tobytes(), "little") == sum(int(c) << j * bits for j, c in enumerate(codes))
    assert packed.size == -(-bits * count // 8)
    assert unpack_codes(packed, bits, count).tolist() == codes.tolist()


def test_codes_that_do_not_fit_their_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"codes of 2 bits are 0\.\.3, found 1\.\.4"):
        pack_codes(np.array([1, 4]), 2)
    with pytest.raises(ValueError, match="1 to 8 bits, not 9"):
        pack_codes(np.array([1]), 9)


def test_bits_beyond_the_last_code_mean_nothing() -> None:
    assert unpack_codes(np.array([0b1111_1101], np.uint8), 1, 3).tolist() == [1, 0, 1]


def test_value_of_a_code_is_a_product_of_float32() -> None:
    scale, level = np.float32(0.1), 0.2
    form = Form("c", 1, (Section(("w",), CodeEncoding(1, (-level, level)), {"w": 0}),), change=True)

    found = decode(
        form, {"codes": np.array([1], np.uint8), "scales": scale.reshape(1)}, {"w": None}, {"w": (1,)}
    )

    assert found["w"][0] == scale * np.float32(level)
    assert found["w"][0] != np.float32(float(scale) * level)  # the case tells the two apart


# One of each encoding; `b` and `values` come from cut and scattered regions.
SHAPES: dict[str, tuple[int, ...]] = {
    "a": (5, 3),
    "b": (4, 4),
    "c": (9,),
    "d": (3,),
    "e": (),
    "f": (7,),
    "g": (6,),
}
REGIONS: dict[str, Region] = {
    "a": None,
    "b": BlockRegion((range(1, 4), (3, 0))),
    "values": EntryRegion(("c", "d"), np.array([0, 4, 8, 10])),
    "e": None,
    "f": None,
    "g": None,
}
MIXED = Form(
    "mixed",
    1,
    (
        Section(("a", "values"), CodeEncoding(1, SIGNS), {"a": 1, "c": 0, "d": 2}),
        Section(("f",), SparseEncoding(0.4)),
        Section(("b",), CodeEncoding(3, (0.0, 1.0, 2.0, 3.0, -1.0, -2.0, -3.0, 9.0)), {"b": 0}),
        Section(("e",), FloatEncoding()),
        Section(("g",), FloatEncoding("bfloat16")),
    ),
    change=True,
)


def mixed_update() -> Arrays:
    return {
        "codes": np.array([0x5B, 0x2A, 0x06, 0x88, 0xC6, 0x02], np.uint8),
        "scales": np.array([0.25, 0.5, 2.0, 4.0], np.float32),
        "values": np.array([1, 2, 3, 7], np.float32),
        "halves": np.array([0x3F80, 0, 0x8000, 0x4000, 0xBF80, 0x3F00], np.uint16),
        "mask": np.array([0b0100_0011], np.uint8),
    }


def test_sections_take_their_parts_of_each_array_in_turn() -> None:
    found = decode(MIXED, mixed_update(), REGIONS, SHAPES)

    signs = [1, 1, -1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, 1, -1]
    assert found["a"].tolist() == (0.5 * np.array(signs).reshape(5, 3)).tolist()
    assert found["values"].tolist() == [-0.25, 0.25, 0.25, -2.0]
    assert found["f"].tolist() == [1, 2, 0, 0, 0, 0, 3]
    assert found["b"].tolist() == [[0, 4], [8, 12], [-4, -8]]
    assert found["e"].shape == () and found["e"] == 7
    assert found["g"].tolist() == [1, 0, 0, 2, -1, 0.5]


def test_tensors_without_entries_take_no_bytes_but_keep_their_scale() -> None:
    form = Form("c", 1, (Section(("v", "w"), CodeEncoding(1, SIGNS), {"v": 0, "w": 1}),), change=True)
    arrays = {"codes": np.array([1], np.uint8), "scales": np.array([9, 2], np.float32)}

    found = decode(form, arrays, {"v": None, "w": None}, {"v": (0,), "w": (1,)})

    assert found["v"].shape == (0,) and found["w"].tolist() == [2]


def test_dense_update_is_given_back_as_it_is() -> None:
    arrays: Arrays = {"a": np.ones((5, 3), np.float32), "b": np.zeros((3, 2), np.float32)}

    found = decode(DENSE, arrays, {"a": REGIONS["a"], "b": REGIONS["b"]}, SHAPES)

    assert found == arrays and all(found[name] is array for name, array in arrays.items())


def without(name: str) -> Arrays:
    return {key: array for key, array in mixed_update().items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (without("scales"), r"arrays of an update are \[.*'mask', 'values'\], expected \[.*'scales'"),
        ({**mixed_update(), "extra": np.zeros(1)}, r"'extra'.*expected \['codes'"),
        (
            {**mixed_update(), "codes": np.zeros(5, np.uint8)},
            r"'codes': found uint8 \[5\], expected uint8 \[6\]",
        ),
        ({**mixed_update(), "codes": np.zeros((6, 1), np.uint8)}, r"found uint8 \[6, 1\]"),
        ({**mixed_update(), "scales": np.ones(4)}, r"'scales': found float64 \[4\], expected float32 \[4\]"),
        ({**mixed_update(), "halves": np.ones(6, np.float16)}, r"found float16 \[6\], expected uint16 \[6\]"),
        (
            {**mixed_update(), "mask": np.array([0b0100_0111], np.uint8)},
            "keeps 4 of the 7 entries of 'f', expected 3",
        ),
        ({**mixed_update(), "mask": np.array([0b1000_0011], np.uint8)}, "bits set beyond its last entry"),
    ],
)
def test_arrays_that_are_not_those_of_the_form_are_refused(arrays: Mapping[str, Array], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(MIXED, arrays, REGIONS, SHAPES)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, r"tensors of an update are \[\], expected \['c'\]"),
        ({"c": np.zeros(8, np.float32)}, r"tensor 'c' is float32 \[8\], expected float32 \[9\]"),
        ({"c": np.zeros(9, np.int64)}, r"tensor 'c' is int64 \[9\], expected float32 \[9\]"),
    ],
)
def test_dense_tensors_of_wrong_name_shape_or_dtype_are_refused(arrays: Arrays, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(DENSE, arrays, {"c": None}, SHAPES)


def test_form_that_does_not_fit_the_placement_is_refused() -> None:
    with pytest.raises(ProtocolError, match="tensors of the form"):
        decode(MIXED, mixed_update(), {**REGIONS, "h": None}, {**SHAPES, "h": (2,)})
    groupless = (replace(MIXED.sections[0], groups={"a": 0, "c": 1, "x": 2}), *MIXED.sections[1:])
    with pytest.raises(ProtocolError, match="gives 'd' no scale, but 'values' holds entries of it"):
        decode(replace(MIXED, sections=groupless), mixed_update(), REGIONS, SHAPES)


def test_reader_needs_no_torch() -> None:
    script = "import sys, edgefl.wire.update.decode; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

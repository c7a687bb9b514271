"""Tensors as bytes, from senders one cannot trust."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import numpy as plain

from edgefl.wire import bits, tensors
from tests.support.errors import ProtocolError, refuses

DTYPES = st.sampled_from(
    [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.int8, np.bool_]
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="~"), min_size=1, max_size=8)


@given(st.dictionaries(NAMES, ARRAYS, max_size=4))
def test_arrays_come_back_with_dtype_shape_and_bits(arrays: tensors.Arrays) -> None:
    found = tensors.load(tensors.dump(arrays))

    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_floats_are_written_as_safetensors_writes_them() -> None:
    arrays = {
        name: np.full(shape, 0.5, np.float32)
        for name, shape in {"b": (3, 2), 'a."\\\n\x01é': (), "c": (0, 3), "c.1": (1,)}.items()
    }
    assert tensors.dump(arrays) == plain.save({name: arrays[name] for name in sorted(arrays)})


def test_order_of_the_mapping_does_not_matter() -> None:
    a, b = np.ones(3, np.float32), np.zeros(2, np.float32)

    assert tensors.dump({"a": a, "b": b}) == tensors.dump({"b": b, "a": a})


def test_views_are_stored_by_value() -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = tensors.load(tensors.dump({"t": grid.T, "step": grid[:, ::2]}))

    np.testing.assert_array_equal(found["t"], grid.T)
    np.testing.assert_array_equal(found["step"], grid[:, ::2])


def test_big_endian_arrays_keep_their_values() -> None:
    found = tensors.load(tensors.dump({"x": np.array([1.0, 2.0], ">f4")}))

    np.testing.assert_array_equal(found["x"], np.array([1.0, 2.0], np.float32))


WHOLE = tensors.dump({"a": np.arange(4, dtype=np.float32), "b": np.ones((2, 2), np.int64)})


@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not valid safetensors"):
        tensors.load(data)


@given(st.integers(0, len(WHOLE) - 1))
def test_truncated_bytes_raise_protocol_error(cut: int) -> None:
    with pytest.raises(ProtocolError):
        tensors.load(WHOLE[:cut])


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 255))
def test_damaged_bytes_raise_nothing_but_protocol_error(place: int, value: int) -> None:
    damaged = bytearray(WHOLE)
    damaged[place] = value
    try:
        tensors.load(bytes(damaged))
    except ProtocolError:
        return


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "U4", "C64", "NONSENSE"])
def test_dtypes_that_numpy_lacks_raise_nothing_but_protocol_error(dtype: str) -> None:
    header = json.dumps({"a": {"dtype": dtype, "shape": [2], "data_offsets": [0, 4]}}).encode()
    try:
        tensors.load(len(header).to_bytes(8, "little") + header + bytes(4))
    except ProtocolError:
        return


def test_a_header_that_promises_more_than_there_is_raises_protocol_error() -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}).encode()

    with pytest.raises(ProtocolError):
        tensors.load(len(header).to_bytes(8, "little") + header + bytes(4))


# --- masks ---


def mask_of(count: int, *held: int) -> tensors.Array:
    mask = np.zeros(count, np.bool_)
    mask[list(held)] = True
    return bits.pack(mask)


SPARSE, EVERY_OTHER = mask_of(1000, 3, 500, 999), mask_of(999, *range(0, 999, 2))
VALUES = np.arange(3, dtype=np.float32)


@given(st.dictionaries(NAMES, hnp.arrays(np.bool_, st.integers(0, 200)), max_size=3), ARRAYS)
def test_masks_are_stored_in_their_smaller_form(masks: dict[str, bits.Mask], other: tensors.Array) -> None:
    arrays = {"another tensor": other} | {name: bits.pack(mask) for name, mask in masks.items()}
    data = tensors.dump(arrays, {name: mask.size for name, mask in masks.items()})
    found, stored = tensors.load(data), plain.load(data)

    assert found.keys() == arrays.keys()
    assert len(stored) == len(arrays)
    for name, mask in masks.items():
        np.testing.assert_array_equal(bits.unpack(found[name], mask.size), mask)
        forms = [array for entry, array in stored.items() if entry.partition("~")[0] == name]
        packed = bits.pack(mask)
        assert [form.nbytes for form in forms] == [min(packed.size, bits.gap_bytes(packed, mask.size))]


def test_a_sparse_mask_travels_as_gaps_with_its_count_in_the_name() -> None:
    data = tensors.dump({"mask": SPARSE, "values": VALUES}, {"mask": 1000})

    stored = plain.load(data)
    assert stored["mask~gaps:1000"].tobytes() == bytes([3, 0xF0, 0x03, 0xF2, 0x03])
    np.testing.assert_array_equal(tensors.load(data)["mask"], SPARSE)


def test_a_mask_as_large_in_either_form_travels_as_it_is() -> None:
    arrays = {"one of eight": mask_of(8, 5), "nothing": mask_of(0)}

    assert plain.load(tensors.dump(arrays, {"one of eight": 8, "nothing": 0})).keys() == arrays.keys()


def test_a_dense_mask_travels_as_it_is() -> None:
    data = tensors.dump({"mask": EVERY_OTHER}, {"mask": 999})

    assert data == tensors.dump({"mask": EVERY_OTHER})


def test_i27_a_masked_blob_is_as_long_as_the_formula_and_a_small_header() -> None:
    for share in (1 / 64, 1 / 4):
        mask = np.random.default_rng(7).random(400_000) < share
        held = int(mask.sum())
        data = tensors.dump(
            {"mask": bits.pack(mask), "values": np.ones(held, np.float32)}, {"mask": mask.size}
        )
        packed = bits.pack(mask)
        formula = min(bits.gap_bytes(packed, mask.size), packed.size) + 4 * held

        assert formula < len(data) <= formula + 200


def test_equal_masks_give_equal_bytes_whatever_the_order() -> None:
    one = tensors.dump({"a": SPARSE, "b": EVERY_OTHER, "c": SPARSE}, {"a": 1000, "b": 999, "c": 1000})
    other = tensors.dump({"c": SPARSE, "b": EVERY_OTHER, "a": SPARSE}, {"c": 1000, "b": 999, "a": 1000})

    assert one == other


def test_a_mask_that_was_not_announced_stays_as_it_is() -> None:
    assert plain.load(tensors.dump({"mask": SPARSE})).keys() == {"mask"}


@pytest.mark.parametrize("name", ["~", "a~b", "mask~gaps:3"])
def test_names_with_a_tilde_are_refused(name: str) -> None:
    with refuses(ProtocolError, name=name, reserved="~"):
        tensors.dump({name: VALUES})


def test_a_mask_without_its_tensor_is_refused() -> None:
    with pytest.raises(ProtocolError, match="there is no tensor 'mask'"):
        tensors.dump({"values": VALUES}, {"mask": 1000})


@pytest.mark.parametrize("array", [SPARSE[:-1], SPARSE.astype(np.int64), SPARSE.reshape(5, 25), VALUES])
def test_an_array_that_is_no_packed_mask_of_its_count_is_refused(array: tensors.Array) -> None:
    with refuses(ProtocolError, count=1000, shape=...):
        tensors.dump({"mask": array}, {"mask": 1000})


def hostile(entries: Mapping[str, tensors.Array]) -> bytes:
    return bytes(plain.save(dict(entries)))


GAPS = np.array([3], np.uint8)


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ({"m": GAPS, "m~gaps:8": GAPS}, "holds tensor 'm' twice"),
        ({"m~gaps:8": GAPS, "m~gaps:9": GAPS}, "holds tensor 'm' twice"),
        ({"m~gaps:3": GAPS}, "beyond its 3 entries"),
        ({"m~gaps:0": GAPS}, "beyond its 0 entries"),
        ({"m~gaps:8": GAPS | 128}, "cut short"),
        ({"m~gaps:8": GAPS.astype(np.int8)}, "uint8 in one dimension"),
        ({"m~gaps:8": GAPS.reshape(1, 1)}, "uint8 in one dimension"),
        ({"m~gaps:8": GAPS.reshape(())}, "uint8 in one dimension"),
        *(
            ({name: GAPS}, "does not know")
            for name in (
                "~",
                "m~",
                "m~gaps:",
                "m~gaps",
                "m~gaps:-1",
                "m~gaps:08",
                "m~gaps:8 ",
                "m~gaps:8\n",
                "m~gaps:٨",
                "m~gaps:99999999999999999999",
                "m~x:8",
                "a~b~gaps:8",
            )
        ),
    ],
)
def test_masks_that_nobody_sends_are_refused(entries: dict[str, tensors.Array], text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        tensors.load(hostile(entries))


def test_a_mask_beyond_the_bound_is_refused() -> None:
    for count in (tensors.MAX_MASK_BITS + 1, 10**18):
        with refuses(ProtocolError, name="m", count=count, limit=tensors.MAX_MASK_BITS):
            tensors.load(hostile({f"m~gaps:{count}": GAPS}))


def test_the_bound_is_for_all_masks_of_a_blob_together() -> None:
    data = hostile({"a~gaps:60": GAPS, "b~gaps:40": GAPS})

    assert tensors.load(data, max_bits=100).keys() == {"a", "b"}
    with refuses(ProtocolError, name=..., count=..., limit=...):
        tensors.load(data, max_bits=99)


def test_a_receiver_can_take_no_gaps_at_all() -> None:
    assert tensors.load(WHOLE, max_bits=0).keys() == {"a", "b"}
    with refuses(ProtocolError, name="mask", count=1000, limit=0):
        tensors.load(tensors.dump({"mask": SPARSE}, {"mask": 1000}), max_bits=0)


MASKED = tensors.dump({"mask": SPARSE, "values": VALUES}, {"mask": 1000})


@given(st.integers(0, len(MASKED) - 1), st.integers(0, 255))
def test_damaged_masks_raise_nothing_but_protocol_error(place: int, value: int) -> None:
    damaged = bytearray(MASKED)
    damaged[place] = value
    try:
        tensors.load(bytes(damaged), max_bits=10_000)
    except ProtocolError:
        return

"""Tensors as bytes, from senders one cannot trust."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edgefl.wire import tensors
from edgefl.wire.errors import ProtocolError

DTYPES = st.sampled_from(
    [np.float32, np.float64, np.float16, np.int64, np.int32, np.uint8, np.int8, np.bool_]
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(st.dictionaries(st.text(min_size=1, max_size=8), ARRAYS, max_size=4))
def test_arrays_come_back_with_dtype_shape_and_bits(arrays: tensors.Arrays) -> None:
    found = tensors.load(tensors.dump(arrays))

    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


def test_scalars_stay_scalars() -> None:
    assert tensors.load(tensors.dump({"lr": np.array(0.5, np.float32)}))["lr"].shape == ()


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

"""Numbers as bytes inside a graph: bit order, and bfloat16 as torch itself has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl.codecs.packing import bfloat16_bits, pack_codes
from edgefl.wire.update import decode


def torch_bits(x: torch.Tensor) -> list[int]:
    """uint16 bits of torch's own bfloat16."""
    return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).tolist()


def test_first_code_is_the_lowest_bit_of_the_first_byte() -> None:
    assert pack_codes([torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0, 1, 1])], 1).tolist() == [1, 3]
    assert pack_codes([torch.arange(7.0)], 3).numpy().tobytes().hex() == "88c61a"


def test_each_tensor_begins_with_a_byte_of_its_own() -> None:
    assert pack_codes([torch.ones(1), torch.ones(2, 2), torch.zeros(8)], 1).tolist() == [1, 15, 0]


@pytest.mark.parametrize("bits", range(1, 9))
def test_graph_and_server_pack_alike(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, 1_001)
    packed = pack_codes([torch.from_numpy(codes)], bits).numpy()
    assert packed.tobytes() == decode.pack_codes(codes.astype(np.uint8), bits).tobytes()


def test_bfloat16_has_torchs_bits_for_normal_numbers() -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-126, 127.0).repeat_interleave(40)
    x = (1 + torch.rand(exponents.shape, generator=generator)) * 2.0**exponents
    assert bfloat16_bits(x).tolist() == torch_bits(x)
    assert bfloat16_bits(-x).tolist() == torch_bits(-x)


def test_bfloat16_rounds_ties_to_even_and_carries_into_the_exponent() -> None:
    ties = torch.tensor([1 + (2 * n + 1) / 256 for n in range(128)])
    for scale in (2.0**-126, 2.0**-3, 1.0, 2.0**100):
        assert bfloat16_bits(ties * scale).tolist() == torch_bits(ties * scale)
    # The last one is half a step below 2: it becomes 2, of the next exponent.
    assert decode.widen(bfloat16_bits(ties[-1:]).numpy()).tolist() == [2.0]


def test_bfloat16_of_zero_and_subnormals_is_zero() -> None:
    assert bfloat16_bits(torch.tensor([0.0, -0.0])).tolist() == [0, 0]
    small = torch.tensor([2.0**-127, -(2.0**-127), 2.0**-140, -(2.0**-149)])
    assert decode.widen(bfloat16_bits(small).numpy()).tolist() == [0, 0, 0, 0]


def test_bfloat16_of_what_is_not_finite_is_never_finite() -> None:
    """The server must see that training diverged."""
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, torch.finfo(torch.float32).max])
    assert not np.isfinite(decode.widen(bfloat16_bits(x).numpy())).any()


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False).filter(lambda x: x == 0 or abs(x) >= 2**-126)
)
def test_bfloat16_of_any_number_is_torch_s(number: float) -> None:
    x = torch.tensor([number])
    expected = [0] if number == 0 else torch_bits(x)
    assert bfloat16_bits(x).tolist() == expected

"""New weights: a quotient without a division has its bits, and so has a model that is made at once those of one made in
parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from edgefl.wire.regions import Region
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import CHANGE_LIMIT, DENSE, CodeEncoding, FloatEncoding, Form, Section
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.aggregate.blocks import quotient
from edgefl_server.aggregate.scatter import BLOCK

OLD: Arrays = {
    "a": np.linspace(-1, 1, 3 * BLOCK + 77, dtype=np.float32),
    "b": np.zeros((0, 3), np.float32),
    "c": np.linspace(-1e-30, 1e-30, 55, dtype=np.float32).reshape(5, 11),
    "d": np.array(-0.0, np.float32),
    "e": np.linspace(1, 1e6, 2 * BLOCK, dtype=np.float32).reshape(2, -1)[:, ::2],
}
REGIONS: dict[str, Region] = dict.fromkeys(OLD)
NAMES = tuple(OLD)
FORMS = {
    "dense": DENSE,
    "changes": Form(change=True),
    "signs": Form("signs", (Section(NAMES, CodeEncoding(1, (-1.0, 1.0), 0.01)),), change=True),
    "halves": Form("halves", (Section(NAMES, FloatEncoding("float16")),), change=True),
}


@njit
def _quotients(sums: Array, share: float, found: Array) -> None:
    for i in range(sums.shape[0]):
        found[i] = quotient(sums[i], share, 1.0 / share)


@given(
    st.integers(1, 2**42),
    st.integers(0, 61),
    st.lists(st.integers(-(2**62), 2**62), min_size=1),
    st.integers(0, 2**32 - 1),
)
def test_a_quotient_is_that_of_a_division(weight: int, bits: int, sums: list[int], seed: int) -> None:
    rng, share = np.random.default_rng(seed), weight * 2.0**bits
    wide = rng.integers(-(2**62), 2**62, 4096) >> rng.integers(0, 62, 4096)
    near = np.rint(rng.integers(2**52, 2**53, 4096).astype(float) * weight / 2.0 ** rng.integers(1, 60))
    dividends = np.concatenate([np.array(sums, float), wide.astype(float), near])
    found = np.empty_like(dividends)
    _quotients(dividends, share, found)
    assert found.tobytes() == (dividends / share).tobytes()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_made_at_once_has_the_bits_of_one_made_in_parts(form: str, threads: int) -> None:
    rng, entries = np.random.default_rng(3), {name: array.size for name, array in OLD.items()}
    results = []
    updates = [_update(FORMS[form], entries, rng) for _ in range(5)]
    for in_parts in (False, True):
        aggregator = Aggregator(layout_of(OLD), weight_limit=99, device="cpu", threads=threads)
        for number, update in enumerate(updates):
            aggregator.add(aggregator.check(update, REGIONS, FORMS[form]), 1 + 3 * number)
        if in_parts:
            aggregator.partial()  # the sums lie in memory from now on
        results.append(aggregator.result(OLD))
    one, other = results
    assert all(one[name].tobytes() == other[name].tobytes() for name in OLD)
    assert any((one[name] != OLD[name]).any() for name in OLD)


def _update(form: Form, entries: dict[str, int], rng: np.random.Generator) -> Arrays:
    if not form.sections:
        return {name: rng.uniform(-9, 9, array.shape).astype(np.float32) for name, array in OLD.items()}
    arrays = {}
    for name, (dtype, length) in form.arrays(entries).items():
        if name == "codes":
            arrays[name] = rng.integers(0, 256, length, np.uint8)
        else:
            arrays[name] = rng.uniform(-1, 1, length).astype(np.float16).view(dtype)
    return arrays


def test_a_model_that_somebody_holds_is_not_written_over() -> None:
    """Each round's new weights may lie where those of an earlier round did, unless anybody has them."""
    sums, models, copies = None, [OLD], []
    for number in range(4):
        aggregator = Aggregator(layout_of(OLD), weight_limit=1, device="cpu", sums=sums)
        change = {name: np.full(array.shape, number + 1.0, np.float32) for name, array in OLD.items()}
        aggregator.add(aggregator.check(change, REGIONS, Form(change=True)), 1)
        models.append(aggregator.result(models[-1]))
        copies.append({name: array.copy() for name, array in models[-1].items()})
        sums = aggregator.release_sums()
    for model, copy in zip(models[1:], copies, strict=True):
        assert all(model[name].tobytes() == copy[name].tobytes() for name in OLD)
    assert float(models[-1]["d"]) == 10.0 < CHANGE_LIMIT

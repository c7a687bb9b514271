"""What is read at once is what is read one tensor after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.regions import BlockRegion, EntryRegion, Region
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import read, split
from edgefl.wire.update.form import DENSE, CodeEncoding, FloatEncoding, Form, Section, SparseEncoding
from edgefl_server.aggregate.statistics import make_reader

SHAPES = {"a": (3, 5), "b": (7,), "c": (), "d": (0,), "e": (4, 2)}
REGIONS: dict[str, Region] = {
    "a": BlockRegion.leading(2, 3),
    "b": None,
    "c": None,
    "d": None,
    "mixed": EntryRegion(("b", "e"), np.array([1, 5, 7, 10, 14])),
}
ENCODINGS = (
    CodeEncoding(1, (-1.0, 1.0)),
    CodeEncoding(3, tuple(map(float, range(8)))),
    CodeEncoding(2, (-1.0, 0.0, 1.0, 2.0), scale=0.25),
    FloatEncoding(),
    FloatEncoding("float16"),
)


def form_of(encodings: dict[str, int]) -> Form:
    """Tensors of one encoding make up a section."""
    sections = []
    for number, encoding in enumerate(ENCODINGS):
        names = tuple(sorted(name for name, chosen in encodings.items() if chosen == number))
        groups = {part: at for at, part in enumerate(sorted({p for n in names for p in parts_of(n)}))}
        if names:
            sections.append(Section(names, encoding, groups if isinstance(encoding, CodeEncoding) else {}))
    return Form("test", sections=tuple(sections), change=True)


def parts_of(name: str) -> tuple[str, ...]:
    return ("b", "e") if name == "mixed" else (name,)


def some(form: Form, sizes: dict[str, int], seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, (dtype, length) in form.arrays(sizes).items():
        if dtype == "uint8":
            arrays[name] = rng.integers(0, 256, length).astype(np.uint8)
        else:
            arrays[name] = rng.standard_normal(length).astype(dtype)
    return arrays


SIZES = {"a": 6, "b": 7, "c": 1, "d": 0, "mixed": 5}


@given(
    st.fixed_dictionaries({name: st.integers(0, len(ENCODINGS) - 1) for name in REGIONS}),
    st.sets(st.sampled_from(sorted(REGIONS))),
    st.integers(0, 99),
)
def test_any_tensors_of_any_codes(encodings: dict[str, int], held: set[str], seed: int) -> None:
    form = form_of(encodings)
    arrays = some(form, SIZES, seed)
    at_once = make_reader(form, held, REGIONS, SHAPES)

    assert at_once is not None and set(at_once.names) == held
    by_name = {
        coded.name: read(coded, REGIONS[coded.name], SHAPES) for coded in split(form, arrays, REGIONS, SHAPES)
    }
    expected = [by_name[name] for name in at_once.names]
    np.testing.assert_array_equal(at_once(arrays), np.concatenate([np.empty(0, np.float32), *expected]))


def test_a_dense_update() -> None:
    arrays: Arrays = {"a": np.ones((2, 3), np.float32), "b": np.arange(7, dtype=np.float32)}
    at_once = make_reader(DENSE, {"b", "a"}, {"a": REGIONS["a"], "b": None}, SHAPES)
    assert at_once is not None and at_once.names == ("a", "b")
    np.testing.assert_array_equal(at_once(arrays), [1, 1, 1, 1, 1, 1, 0, 1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("held", ["a", "b"])
def test_what_travels_with_a_mask_is_not_read_at_once(held: str) -> None:
    sections = (Section(("a",), SparseEncoding(0.5)), Section(("b",), FloatEncoding()))
    form = Form("test", sections=sections, change=True)
    at_once = make_reader(form, {held}, {"a": None, "b": None}, SHAPES)
    assert (at_once is None) == (held == "a")
    if at_once is not None:
        values = np.arange(15, dtype=np.float32)
        np.testing.assert_array_equal(at_once({"values": values}), values[8:])

"""The compiled sums against a plain one: any form, region, weight, batch and number of threads, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.bits import pack, packed_bytes
from edgefl.wire.regions import BlockRegion, EntryRegion, Region, local_shape, pieces
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import decode, widen
from edgefl.wire.update.form import (
    CHANGE_LIMIT,
    DENSE,
    VALUE_LIMIT,
    CodeEncoding,
    Encoding,
    FloatEncoding,
    Form,
    Section,
    SparseEncoding,
)
from edgefl_server.aggregate import averaging
from edgefl_server.aggregate.accumulator import CpuAccumulator
from edgefl_server.aggregate.adders import CheckedArrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.aggregate.scatter import BLOCK, LENGTH, Integers, compile_pieces
from tests.support.errors import UpdateRejected, refuses

OLD: Arrays = {
    "a": np.linspace(-1, 1, 37 * 11, dtype=np.float32).reshape(37, 11),
    "b": np.array(0.25, np.float32),
    "c": np.full(64, 2.0, np.float32),
    "d": np.arange(BLOCK + 300, dtype=np.float32).reshape(4, -1) / 100,
    "e": np.full((3, 5), -3.0, np.float32),
}
SHAPES = {name: array.shape for name, array in OLD.items()}
LAYOUT = layout_of(OLD)
SIZE = LAYOUT.size
REGIONS: dict[str, dict[str, Region]] = {
    "whole": dict.fromkeys(OLD),
    "suffix": dict.fromkeys(("d", "e")),
    "slices": {
        "a": BlockRegion((range(3, 30), range(10))),
        "c": BlockRegion(((5, 2, 63),)),
        "d": BlockRegion((range(1, 3), None)),
    },
    "narrow": {"d": BlockRegion((None, range(0, 1000, 3))), "b": None},
    "entries": {
        "kept": EntryRegion(
            ("c", "a", "d"), np.flatnonzero(np.random.default_rng(5).random(64 + 407 + BLOCK + 300) < 0.6)
        ),
        "e": BlockRegion.leading(2, 4),
        "b": None,
    },
    "one": {"kept": EntryRegion(("a", "c"), np.array([406, 407])), "e": None},
}


@dataclass(frozen=True)
class Case:
    """Updates of one round: (regions, form, arrays, weight) each."""

    updates: tuple[tuple[Mapping[str, Region], Form, Arrays, int], ...]


def encodings() -> st.SearchStrategy[Encoding]:
    codes = st.builds(
        lambda bits, seed, scale: CodeEncoding(bits, levels(bits, seed), scale),
        st.integers(1, 8),
        st.integers(0, 99),
        st.sampled_from([None, None, 0.37]),
    )
    values = st.sampled_from([FloatEncoding(), FloatEncoding("float16"), FloatEncoding("bfloat16")])
    return st.one_of(codes, codes, values, st.builds(SparseEncoding, st.sampled_from([0.03, 0.5, 1.0])))


def levels(bits: int, seed: int) -> tuple[float, ...]:
    return tuple(np.random.default_rng(seed).normal(size=1 << bits).tolist())


@st.composite
def forms(draw: st.DrawFn, regions: Mapping[str, Region]) -> Form:
    """Dense, or sections that share the regions' tensors out; at most one type of half, as the layout has it."""
    if draw(st.booleans()) and draw(st.booleans()):
        return replace(DENSE, change=True)
    half = draw(st.sampled_from(["float16", "bfloat16"]))
    chosen: dict[int, list[str]] = {}
    for name in sorted(regions):
        chosen.setdefault(draw(st.integers(0, 2)), []).append(name)
    sections = []
    for _, names in sorted(chosen.items()):
        encoding = draw(encodings())
        if isinstance(encoding, FloatEncoding) and encoding.dtype != "float32":
            encoding = FloatEncoding(half)
        parts = [part for name in names for part, _ in pieces(name, regions[name], SHAPES)]
        together = draw(st.booleans())
        groups = {part: 0 if together else number for number, part in enumerate(dict.fromkeys(parts))}
        sections.append(Section(tuple(names), encoding, groups))
    return Form("any", sections=tuple(sections), change=True)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tiers = []
    for name in draw(st.lists(st.sampled_from(sorted(REGIONS)), min_size=1, max_size=3)):
        tiers.append((REGIONS[name], draw(forms(REGIONS[name]))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    updates = []
    for regions, form in tiers:
        for _ in range(draw(st.sampled_from([1, 2, 7, 8, 9, 33, 41]))):
            updates.append((regions, form, drawn(rng, form, regions), int(rng.integers(1, 70_000))))
    return Case(tuple(updates))


def drawn(rng: np.random.Generator, form: Form, regions: Mapping[str, Region]) -> Arrays:
    shapes = {name: local_shape(name, region, SHAPES) for name, region in regions.items()}
    if not form.sections:
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    made: Arrays = {}
    for name, (dtype, length) in form.arrays(sizes).items():
        if dtype == "uint16":
            made[name] = (rng.normal(size=length).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif dtype == "uint8":
            made[name] = rng.integers(0, 256, length, dtype=np.uint8)
        else:
            made[name] = np.abs(rng.normal(size=length)) if name == "scales" else rng.normal(size=length)
            made[name] = made[name].astype(dtype)
    if "mask" in made:
        made["mask"] = pack(np.concatenate([_kept(rng, form, name, sizes[name]) for name in form.masked]))
    return made


def _kept(rng: np.random.Generator, form: Form, name: str, size: int) -> np.ndarray:
    [sparse] = [s.encoding for s in form.sections if name in s.names]
    assert isinstance(sparse, SparseEncoding)
    return rng.permutation(size) < sparse.kept(size)


def plain_sums(case: Case, fraction_bits: int) -> tuple[Integers, Integers]:
    """(sums, weights) of decoded updates, entry by entry of the model, in numpy."""
    sums, weights = np.zeros(SIZE, np.int64), np.zeros(SIZE, np.int64)
    for regions, form, arrays, weight in case.updates:
        decoded = decode(form, arrays, regions, SHAPES)
        for name, region in regions.items():
            flat, start = decoded[name].reshape(-1).astype(np.float64), 0
            for part, positions in pieces(name, region, SHAPES):
                places = LAYOUT.offsets[part] + (
                    np.arange(OLD[part].size) if positions is None else positions
                )
                fixed = np.rint(flat[start : start + places.size] * (float(weight) * 2.0**fraction_bits))
                sums[places] += fixed.astype(np.int64)
                weights[places] += weight
                start += places.size
    return sums, weights


@given(cases(), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_any_mixture_sums_like_a_plain_sum(case: Case, threads: int, again: bool, random: object) -> None:
    total = sum(weight for *_, weight in case.updates)
    sums_before = CpuAccumulator(SIZE, threads)
    sums_before.sums()[:] = 1 << 40 if again else 0  # what an earlier round has left
    aggregator = Aggregator(LAYOUT, weight_limit=total, device="cpu", threads=threads, sums=sums_before)
    shuffled = list(case.updates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for regions, form, arrays, weight in shuffled:
        aggregator.add(aggregator.check(arrays, regions, form), weight)
    sums, weights = plain_sums(case, aggregator.fraction_bits)
    new = aggregator.result(OLD)
    unit = 2.0**aggregator.fraction_bits
    for name, old in OLD.items():
        part = slice(LAYOUT.offsets[name], LAYOUT.offsets[name] + old.size)
        mean = sums[part].astype(np.float64) / (np.maximum(weights[part], 1).astype(np.float64) * unit)
        moved = (old.reshape(-1).astype(np.float64) + mean).astype(np.float32)
        expected = np.where(weights[part] > 0, moved, old.reshape(-1))
        assert new[name].tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [1, 3, 8, 9, 32, 33, 64, 70])
def test_one_bit_sums_do_not_depend_on_how_updates_are_batched(count: int) -> None:
    rng, regions = np.random.default_rng(count), REGIONS["entries"]
    form = Form(
        "signs",
        sections=(Section(("b", "e", "kept"), CodeEncoding(1, (-1.0, 1.0)), _groups(regions)),),
        change=True,
    )
    made = compile_pieces(LAYOUT, regions, form)
    updates = [CheckedArrays(made, _ordered(drawn(rng, form, regions), made.sources)) for _ in range(count)]
    factors = rng.integers(1, 1000, count) * 2.0**20
    together, apart = CpuAccumulator(SIZE, threads=2), CpuAccumulator(SIZE, threads=1)
    together.add(made, updates, factors)
    for update, factor in zip(updates, factors, strict=True):
        apart.add(made, [update], np.array([factor]))
    assert np.array_equal(together.sums(), apart.sums()) and together.sums().any()
    together.reset()
    assert not together.sums().any()


def _groups(regions: Mapping[str, Region]) -> dict[str, int]:
    parts = [part for name, region in regions.items() for part, _ in pieces(name, region, SHAPES)]
    return {part: number for number, part in enumerate(parts)}


def _ordered(arrays: Arrays, sources: tuple[str, ...]) -> tuple[np.ndarray, ...]:
    return tuple(arrays[name] for name in sources)


@pytest.mark.parametrize("kind", sorted(REGIONS))
def test_blocks_cover_every_entry_once_and_are_short(kind: str) -> None:
    regions = REGIONS[kind]
    made = compile_pieces(LAYOUT, regions)
    expected = [
        LAYOUT.offsets[part] + (np.arange(OLD[part].size) if positions is None else positions)
        for name in sorted(regions)
        for part, positions in pieces(name, regions[name], SHAPES)
    ]
    assert np.array_equal(made.targets(), np.concatenate(expected))
    assert (made.blocks[:, LENGTH] > 0).all() and (made.blocks[:, LENGTH] <= BLOCK).all()


def test_neighbouring_tensors_with_one_scale_become_common_blocks() -> None:
    names = tuple(f"t{number:02}" for number in range(64))
    layout = layout_of({name: np.zeros(64, np.float32) for name in names})
    one = Section(names, CodeEncoding(1, (-1.0, 1.0)), dict.fromkeys(names, 0))
    each = Section(names, CodeEncoding(1, (-1.0, 1.0)), {name: number for number, name in enumerate(names)})
    found = [
        len(compile_pieces(layout, dict.fromkeys(names), Form("x", 1, (s,), True)).blocks)
        for s in (one, each)
    ]
    assert found == [1, 64]


def test_every_pattern_of_sixteen_bits_adds_its_value() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    layout = layout_of({"w": np.zeros(1 << 16, np.float32)})
    for dtype in ("float16", "bfloat16"):
        halves = patterns if dtype == "bfloat16" else patterns.view(np.float16)
        with np.errstate(invalid="ignore"):
            wide = widen(halves).astype(np.float64)
        fit = np.isfinite(wide) & (np.abs(wide) <= VALUE_LIMIT)
        form = Form("halves", sections=(Section(("w",), FloatEncoding(dtype)),), change=True)  # type: ignore[arg-type]
        made = compile_pieces(layout, {"w": None}, form)
        sums = CpuAccumulator(1 << 16)
        sums.add(
            made, [CheckedArrays(made, (np.where(fit, halves, 0).astype(halves.dtype),))], np.array([2.0**30])
        )
        assert np.array_equal(sums.sums(), np.rint(np.where(fit, wide, 0) * 2.0**30).astype(np.int64))


SIGNS = Section(("b", "e"), CodeEncoding(1, (-2.0, 2.0)), {"b": 0, "e": 1})
KEPT = Section(("b", "e"), SparseEncoding(0.5))  # of 1 and of 15 entries: 1 and 8
EIGHT = np.zeros(8, np.float32)
FLOATS = Section(("b", "e"), FloatEncoding())
FLOAT16 = Section(("b", "e"), FloatEncoding("float16"))
BFLOAT16 = Section(("b", "e"), FloatEncoding("bfloat16"))
SIGNED = {"codes": np.zeros(3, np.uint8), "scales": np.ones(2, np.float32)}


def mask(*kept: int) -> np.ndarray:
    return pack(np.isin(np.arange(16), kept))


def halves(value: float, dtype: str) -> Arrays:
    wide = np.full(16, value, np.float32)
    is_bfloat16 = dtype == "bfloat16"
    return {"halves": (wide.view(np.uint32) >> 16).astype(np.uint16) if is_bfloat16 else wide.astype(dtype)}


@pytest.mark.parametrize(
    ("section", "arrays", "reason"),
    [
        (SIGNS, SIGNED, ""),
        (SIGNS, {"codes": SIGNED["codes"]}, "wrong-names"),
        (SIGNS, {**SIGNED, "values": np.zeros(1, np.float32)}, "wrong-names"),
        *(
            (SIGNS, {**SIGNED, "codes": np.zeros(shape, np.uint8)}, "wrong-shape")
            for shape in (0, 2, 4, (1, 3))
        ),
        (SIGNS, {**SIGNED, "codes": np.zeros(3, np.float32)}, "wrong-dtype"),
        (SIGNS, {**SIGNED, "scales": np.ones(1, np.float32)}, "wrong-shape"),
        (SIGNS, {**SIGNED, "codes": np.zeros(3, np.int8)}, "wrong-dtype"),
        (SIGNS, {**SIGNED, "scales": np.ones(2, np.float64)}, "wrong-dtype"),
        (SIGNS, {**SIGNED, "scales": np.array([1, np.nan], np.float32)}, "not-finite"),
        (SIGNS, {**SIGNED, "scales": np.array([1, np.inf], np.float32)}, "not-finite"),
        (SIGNS, {**SIGNED, "scales": np.array([1, -np.inf], np.float32)}, "not-finite"),
        (SIGNS, {**SIGNED, "scales": np.array([1, -1], np.float32)}, "bad-scale"),
        (SIGNS, {**SIGNED, "scales": np.array([1, 0.6 * CHANGE_LIMIT], np.float32)}, "too-large"),
        (KEPT, {"mask": mask(0, *range(1, 9)), "values": np.zeros(9, np.float32)}, ""),
        (KEPT, {"mask": mask(0, *range(1, 8)), "values": np.zeros(9, np.float32)}, "malformed"),
        (KEPT, {"mask": mask(*range(1, 10)), "values": np.zeros(9, np.float32)}, "malformed"),
        (KEPT, {"mask": mask(0, *range(1, 9)), "values": np.full(9, np.nan, np.float32)}, "not-finite"),
        (KEPT, {"mask": mask(), "values": np.zeros(9, np.float32)}, "malformed"),
        (KEPT, {"mask": mask(0, *range(1, 9)), "values": np.zeros(10, np.float32)}, "wrong-shape"),
        (Section(("e",), SparseEncoding(0.5)), {"mask": mask(*range(8), 15), "values": EIGHT}, "malformed"),
        (FLOATS, {"values": np.full(16, CHANGE_LIMIT * 1.01, np.float32)}, "too-large"),
        (FLOAT16, halves(-CHANGE_LIMIT, "float16"), ""),
        (FLOAT16, halves(4100, "float16"), "too-large"),
        (BFLOAT16, halves(-CHANGE_LIMIT, "bfloat16"), ""),
        (FLOAT16, halves(np.inf, "float16"), "not-finite"),
        (BFLOAT16, halves(-np.inf, "bfloat16"), "not-finite"),
        (BFLOAT16, halves(4128, "bfloat16"), "too-large"),
        (BFLOAT16, halves(1.0, "float16"), "wrong-dtype"),
        (FLOAT16, {"halves": np.zeros(16, np.float32)}, "wrong-dtype"),
    ],
)
def test_arrays_that_do_not_match_the_form_are_refused(section: Section, arrays: Arrays, reason: str) -> None:
    aggregator = Aggregator(LAYOUT, weight_limit=1, device="cpu")
    form, regions = Form("any", sections=(section,), change=True), dict.fromkeys(section.names)
    if not reason:
        aggregator.add(aggregator.check(arrays, regions, form), 1)
        return
    with refuses(UpdateRejected, reason=reason):
        aggregator.check(arrays, regions, form)


def test_few_updates_wait_before_they_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _most_waiting(70) == [*range(1, 65), *range(1, 7)]
    monkeypatch.setattr(averaging, "_ROOM", 0)
    assert _most_waiting(9) == [1, 2, 3, 4, 1, 2, 3, 4, 1]


def _most_waiting(updates: int) -> list[int]:
    """How many wait after each of so many dense updates."""
    aggregator = Aggregator(LAYOUT, weight_limit=100, device="cpu")
    update = aggregator.check(OLD, REGIONS["whole"])
    waiting = []
    for _ in range(updates):
        aggregator.add(update, 1)
        waiting.append(aggregator._average._waiting_bytes // update.nbytes)  # type: ignore[union-attr]
    return waiting


def test_arrays_at_odd_addresses_and_strided_ones_are_read_right() -> None:
    raw = np.zeros(4 * 16 + 1, np.uint8)
    odd = raw[1:].view(np.float32)
    odd[:] = np.arange(16)
    strided = np.repeat(np.arange(16, dtype=np.float32), 2)[::2]
    form = Form("any", sections=(Section(("b", "e"), FloatEncoding()),))
    for values in (odd, strided):
        aggregator = Aggregator(LAYOUT, weight_limit=1, device="cpu")
        aggregator.add(aggregator.check({"values": values}, dict.fromkeys(("b", "e")), form), 1)
        assert aggregator.result(OLD)["e"].reshape(-1).tolist() == list(range(1, 16))


@pytest.mark.parametrize(("value", "reason"), [(-VALUE_LIMIT, ""), (1.01 * VALUE_LIMIT, "too-large")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_may_be_larger_than_changes(dtype: str, value: float, reason: str) -> None:
    name = "values" if dtype == "float32" else "halves"
    if dtype == "float16":
        value, reason = (60_000, "") if not reason else (np.inf, "not-finite")
    arrays = {name: np.full(16, value, np.float32)} if dtype == "float32" else halves(value, dtype)
    form = Form("any", sections=(Section(("b", "e"), FloatEncoding(dtype)),))  # type: ignore[arg-type]
    aggregator, regions = Aggregator(LAYOUT, weight_limit=1, device="cpu"), dict.fromkeys(("b", "e"))
    if not reason:
        aggregator.add(aggregator.check(arrays, regions, form), 1)
        assert (aggregator.result(OLD)["e"] == widen_one(value, dtype)).all()
        return
    with refuses(UpdateRejected, reason=reason):
        aggregator.check(arrays, regions, form)


def widen_one(value: float, dtype: str) -> float:
    """What ``value`` is in ``dtype``."""
    return float(np.float16(value)) if dtype == "float16" else value


def test_codes_end_with_the_array() -> None:
    """Nothing is read behind the last byte, which a straddling code must not make the kernels do."""
    for bits in range(1, 9):
        size = 13
        form = Form("x", sections=(Section(("w",), CodeEncoding(bits, levels(bits, 0), 1.0)),), change=True)
        layout = layout_of({"w": np.zeros(size, np.float32)})
        made = compile_pieces(layout, {"w": None}, form)
        block = made.blocks[-1]
        last = int(block[0]) + bits * int(block[1])
        assert -(-last // 8) == packed_bytes(size, bits)

"""Multi-Krum against its definition, written out; whom it leaves out; and what submodels and orders do to it: nothing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.wire.regions import BlockRegion, Region
from edgefl.wire.tensors import Arrays
from edgefl_server.aggregate.aggregator import Aggregator, layout_of
from edgefl_server.aggregate.averaging import distances, select_rows
from edgefl_server.aggregate.robust import BLOCK, RobustRule, unprotected
from edgefl_server.aggregate.statistics import bounds_of

RULE = RobustRule("multi_krum", 0.25)
Row = npt.NDArray[np.float32]


def scores_of(rows: list[list[float]], bad: int) -> list[float]:
    """Of each update the sum of its n - f - 2 smallest distances (Blanchard et al. 2017, section 4)."""
    return [
        math.fsum(
            sorted(
                math.fsum((a - b) ** 2 for a, b in zip(one, other, strict=True))
                for j, other in enumerate(rows)
                if j != i
            )[: len(rows) - bad - 2]
        )
        for i, one in enumerate(rows)
    ]


def by_hand(count: int, trim: float) -> int:
    """The largest f that the share allows, of those for which 2 f + 2 < n."""
    return max(f for f in range(count) if f == 0 or (f <= trim * count + 1e-9 and 2 * f + 2 < count))


updates = st.integers(1, 11).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(-1000, 1000), min_size=4, max_size=4), min_size=count, max_size=count
    )
)


@given(rows=updates, trim=st.sampled_from([0.1, 0.25, 0.34, 0.49]))
def test_those_are_chosen_whose_scores_are_the_lowest(rows: list[list[float]], trim: float) -> None:
    arrays = [np.array(row, np.float32) for row in rows]
    bad = by_hand(len(rows), trim)

    found = select_rows(arrays, RobustRule("multi_krum", trim))

    if not bad:
        assert len(found) == len(rows)
        return
    assert len(found) == len(rows) - bad - 2
    scores = scores_of(rows, bad)
    by_row = {tuple(row): score for row, score in zip(rows, scores, strict=True)}
    # Of equal scores either may be taken.
    assert sorted(by_row[tuple(row.tolist())] for row in found) == sorted(scores)[: len(found)]


@given(rows=updates, seed=st.integers(0, 1000))
def test_no_order_of_arrival_changes_who_is_chosen(rows: list[list[float]], seed: int) -> None:
    arrays = [np.array(row, np.float32) for row in rows]
    order = np.random.default_rng(seed).permutation(len(arrays))

    first, second = select_rows(arrays, RULE), select_rows([arrays[at] for at in order], RULE)

    assert sorted(row.tobytes() for row in first) == sorted(row.tobytes() for row in second)


@pytest.mark.parametrize("attack", ["huge", "flipped", "together"])
def test_bad_updates_are_left_out(attack: str) -> None:
    rng = np.random.default_rng(7)
    honest = [row for row in (1 + 0.1 * rng.normal(size=(9, 400))).astype(np.float32)]
    poison = {
        "huge": [np.full(400, 1e6, np.float32)] * 3,
        "flipped": [-10 * row for row in honest[:3]],
        "together": [np.full(400, 2, np.float32) + 1e-3 * honest[at] for at in range(3)],
    }[attack]

    found = select_rows([*poison, *honest], RULE)

    assert len(found) == 12 - 3 - 2
    assert {id(row) for row in found} <= {id(row) for row in honest}


def test_each_set_of_equal_entries_chooses_among_its_own() -> None:
    rng = np.random.default_rng(1)
    whole = list(rng.normal(size=(5, 6)).astype(np.float32))
    part = [np.where(np.arange(6) < 3, np.nan, row + 50).astype(np.float32) for row in whole]
    whole[4] += 1000
    part[2] -= 1000
    rule = RobustRule("multi_krum", 0.2)

    found = select_rows([*whole, *part], rule)

    both = [*select_rows(whole, rule), *select_rows(part, rule)]
    assert sorted(row.tobytes() for row in found) == sorted(row.tobytes() for row in both)
    assert len(found) == 4 and not any(np.nanmax(np.abs(row)) > 500 for row in found)


def test_blocks_do_not_show_in_distances() -> None:
    rng = np.random.default_rng(3)
    rows = list(rng.integers(-8, 8, (3, BLOCK)).astype(np.float32))

    found = distances(rows)

    stacked = np.stack(rows).astype(np.float64)
    assert found.tolist() == np.square(stacked[:, None] - stacked[None]).sum(axis=2).tolist()


@pytest.mark.parametrize(("trim", "open_to_one"), [(0.1, [*range(1, 10)]), (0.34, [1, 2, 3, 4])])
def test_so_few_devices_are_not_protected(trim: float, open_to_one: list[int]) -> None:
    rule = RobustRule("multi_krum", trim)
    assert [count for count in range(13) if unprotected(rule, count)] == open_to_one
    for count in range(1, 13):
        rows = [np.ones(2, np.float32) for _ in range(count)]
        rows[0] = np.full(2, 1e6, np.float32)
        assert any(row[0] > 1 for row in select_rows(rows, rule)) == (count in open_to_one)


OLD: Arrays = {
    "a": np.zeros((4, 2), np.float32),
    "bn.running_mean": np.zeros(2, np.float32),
    "bn.running_var": np.full(2, 400, np.float32),
}


def test_a_round_takes_the_mean_of_the_chosen() -> None:
    """Five devices hold everything and five the upper half; one of either kind is bad. Honest variances differ by more than
    any weight, and do not count."""
    half: dict[str, Region] = {"a": BlockRegion((range(2), None))}
    whole: dict[str, Region] = dict.fromkeys(OLD)
    sums = Aggregator(
        layout_of(OLD),
        weight_limit=10,
        device="cpu",
        rule=RobustRule("multi_krum", 0.2),
        statistics=bounds_of(OLD, ["bn.running_mean", "bn.running_var"], 0.0),
    )
    for at in range(5):
        weight = 100.0 if at == 0 else 1 + at / 100
        sent = {
            "a": np.full((4, 2), weight, np.float32),
            "bn.running_mean": np.zeros(2, np.float32),
            "bn.running_var": np.full(2, 400 + 90 * at, np.float32),
        }
        sums.add(sums.check(sent, whole), 1)
        sums.add(sums.check({"a": np.full((2, 2), -100 if at == 1 else 2.0, np.float32)}, half), 1)

    new = sums.result(OLD)

    assert (new["a"][2:] >= 1.01).all() and (new["a"][2:] <= 1.04).all()
    assert (new["a"][:2] > 1.4).all() and (new["a"][:2] < 1.6).all(), "two of each kind"


def test_shares_of_a_round_choose_as_one() -> None:
    """What other processes added counts with the rest."""
    rng = np.random.default_rng(2)
    rows = [{"a": rng.normal(size=(4, 2)).astype(np.float32)} for _ in range(6)]
    old, regions = {"a": OLD["a"]}, {"a": None}

    def made(some: list[Arrays]) -> Aggregator:
        sums = Aggregator(layout_of(old), weight_limit=6, device="cpu", rule=RULE)
        for row in some:
            sums.add(sums.check(row, regions), 1)
        return sums

    one, two = made(rows), made(rows[:2])
    partial = made(rows[2:]).partial()
    assert partial is not None
    two.take(partial)

    assert one.result(old)["a"].tobytes() == two.result(old)["a"].tobytes()

"""How slow clients are, what they spend, and who vanishes."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

import edgefl
from edgefl.config.rounds import SimulationTable
from edgefl.config.text import changes, dump
from edgefl.simulator.clients import ClientWork, SimulatedFleet
from tests.simulator.small import federation, read_back
from tests.support.errors import ConfigError

WORK = ClientWork("strong", steps=10, down_bytes=2_000_000, up_bytes=500_000)
COSTS: dict[str, float] = {
    "step_ms": 100,
    "down_mbit": 8,
    "up_mbit": 1,
    "watts": 2,
    "down_joules_per_mb": 3,
    "up_joules_per_mb": 5,
}
"""Two seconds to fetch, one to train and four to send; 6, 2 and 2.5 joules."""


def fleet(**table: object) -> SimulatedFleet:
    return SimulatedFleet(SimulationTable.model_validate(table), seed=3)


def test_a_round_takes_fetching_steps_and_sending_and_costs_their_energy() -> None:
    one = fleet(**COSTS)

    assert one.seconds("strong-0", WORK) == pytest.approx(7.0)
    assert one.joules(1, "strong-0", WORK, 7.0) == pytest.approx(10.5)


@pytest.mark.parametrize(("until", "spent"), [(0.0, 0.0), (1.0, 3.0), (2.5, 7.0), (5.0, 9.25), (99.0, 10.5)])
def test_a_client_that_is_not_ready_has_spent_what_it_had_done_by_then(until: float, spent: float) -> None:
    assert fleet(**COSTS).joules(1, "strong-0", WORK, until) == pytest.approx(spent)


def test_one_that_vanishes_has_fetched_and_trained_and_sends_nothing() -> None:
    assert fleet(**COSTS, dropout=1.0).joules(1, "strong-0", WORK, 99.0) == pytest.approx(8.0)


def test_bytes_cost_energy_where_links_take_no_time() -> None:
    assert fleet(up_joules_per_mb=4).joules(1, "strong-0", WORK, 0.0) == pytest.approx(2.0)


def test_a_slow_client_draws_power_for_longer() -> None:
    one = fleet(**COSTS, spread=1.0)
    slowness = one.slowness("strong", "strong-0")

    assert slowness != 1.0
    assert one.joules(1, "strong-0", WORK, math.inf) == pytest.approx(6.0 + 2.0 * slowness + 2.5)


def test_a_tier_has_its_own_speed_and_the_table_s_for_the_rest() -> None:
    mixed = fleet(**COSTS, tiers={"weak": {"step_ms": 300, "dropout": 1.0}})
    weak = ClientWork("weak", WORK.steps, WORK.down_bytes, WORK.up_bytes)

    assert mixed.seconds("weak-0", weak) == pytest.approx(9.0)
    assert mixed.seconds("strong-0", WORK) == pytest.approx(7.0)
    assert mixed.vanishes(1, "weak", "weak-0") and not mixed.vanishes(1, "strong", "strong-0")


def test_draws_belong_to_the_seed_the_client_and_the_round() -> None:
    table = SimulationTable(spread=1.0, dropout=0.5)
    one, same, other = SimulatedFleet(table, 3), SimulatedFleet(table, 3), SimulatedFleet(table, 4)
    clients = [f"all-{number}" for number in range(400)]

    def slow(drawn: SimulatedFleet) -> list[float]:
        return [drawn.slowness("all", client) for client in clients]

    def gone(drawn: SimulatedFleet, number: int) -> list[bool]:
        return [drawn.vanishes(number, "all", client) for client in clients]

    assert slow(one) == slow(same) != slow(other)
    assert gone(one, 1) == gone(same, 1) != gone(one, 2) and gone(one, 1) != gone(other, 1)
    assert sum(gone(one, 1)) == pytest.approx(200, abs=40)
    logarithms = [math.log(each) for each in slow(one)]
    mean = sum(logarithms) / len(logarithms)
    assert mean == pytest.approx(0.0, abs=0.2)
    assert math.sqrt(sum((each - mean) ** 2 for each in logarithms) / 400) == pytest.approx(1.0, abs=0.15)


def test_a_tiers_table_is_kept_in_a_file() -> None:
    slow = federation(simulation={"step_ms": 100, "tiers": {"weak": {"step_ms": 300}}})
    other = federation(simulation={"step_ms": 100, "tiers": {"weak": {"step_ms": 0}}})

    assert read_back(dump(slow)).simulation.of_tier("weak").step_ms == 300
    assert changes(slow, other, but=set()) == [
        'simulation.tiers was {"weak" = {"step_ms" = 300.0}}, is {"weak" = {"step_ms" = 0.0}}'
    ]


def test_objects_have_the_table_too() -> None:
    table = {"step_ms": 100, "watts": 2, "tiers": {"strong": {"step_ms": 50}}}
    made = edgefl.federation("mlp", tiers={"strong": edgefl.Tier(count=1)}, tables={"simulation": table})

    assert made.simulation.of_tier("strong").step_ms == 50 and made.simulation.of_tier("strong").watts == 2


def test_a_tier_that_there_is_not_and_power_for_no_time_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"simulation\.tiers has week, and the tiers are strong, weak"):
        federation(simulation={"tiers": {"week": {"step_ms": 300}}})
    with pytest.raises(ValidationError, match=r"simulation\.tiers\.weak: watts .* set step_ms"):
        SimulationTable.model_validate({"tiers": {"weak": {"watts": 2}}})

"""Which rounds are undone for what they did to the model."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl.config import parse
from edgefl.errors import ConfigError
from edgefl_server.coordinator import machine, states
from edgefl_server.coordinator.collapse import BestMetrics, RollbackRule, best_of, collapse
from edgefl_server.coordinator.roster import TierRule
from edgefl_server.coordinator.states import DeviceHello, ModelReady, Rules, StartRound

RULE = RollbackRule(accuracy=0.2, loss=3.0)
SO_FAR = BestMetrics(accuracy=0.8, loss=0.5)


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"accuracy": 0.61, "loss": 1.4}, ""),
        ({"accuracy": 0.59, "loss": 0.5}, "accuracy is 0.59, more than 0.2 below the best so far, 0.8"),
        ({"accuracy": 0.9, "loss": 1.6}, "loss is 1.6, more than 3 times the lowest so far, 0.5"),
        ({"accuracy": 0.9, "loss": math.nan}, "loss is nan"),
        ({"accuracy": 0.9, "loss": math.inf}, "loss is inf"),
        ({"accuracy": math.nan}, "accuracy is nan"),
        ({"perplexity": 4.0, "loss": 1.4}, ""),
        ({}, ""),
    ],
)
def test_a_round_is_undone_that_is_worse_than_the_rule_allows(metrics: dict[str, float], why: str) -> None:
    assert collapse(RULE, SO_FAR, metrics) == why


def test_a_first_round_cannot_collapse_and_half_a_rule_checks_its_half() -> None:
    assert not collapse(RULE, BestMetrics(), {"accuracy": 0.1, "loss": 9.0})
    assert not collapse(RollbackRule(accuracy=0.2), SO_FAR, {"accuracy": 0.7, "loss": 99.0})
    assert not collapse(RollbackRule(loss=3.0), SO_FAR, {"accuracy": 0.0, "loss": 1.0})
    assert not collapse(RollbackRule(loss=3.0), BestMetrics(loss=-1.0), {"loss": 5.0}), (
        "no multiples of what is not above 0"
    )
    assert [rule.on for rule in (RollbackRule(), RollbackRule(0.1), RollbackRule(0, 2.0))] == [
        False,
        True,
        True,
    ]


@given(falls=st.lists(st.floats(0, 0.2), max_size=30))
def test_many_small_steps_down_end_where_one_large_one_would(falls: list[float]) -> None:
    best, accuracy = BestMetrics(accuracy=0.9), 0.9
    for fall in falls:
        after = accuracy - fall
        if not collapse(RULE, best, {"accuracy": after}):
            accuracy, best = after, best.after({"accuracy": after})
    assert accuracy >= 0.7 - 1e-9 and best.accuracy == 0.9


def test_the_best_is_of_the_rounds_that_count_and_of_numbers() -> None:
    rounds = [
        {"accuracy": 0.5, "loss": None},
        {"accuracy": 0.4, "loss": 0.7},
        {"accuracy": math.nan, "loss": 0.9},
    ]
    assert best_of(rounds) == BestMetrics(0.5, 0.7) and best_of([]) == BestMetrics()


def test_rounds_that_are_undone_do_not_end_a_run_however_many() -> None:
    """Three steps of the server that fail do; bad devices could make that of three bad rounds."""
    rules = Rules("run", 0, 9, (TierRule("all", ("*",)),))
    state, actions = machine.step(rules, machine.initial("v", 0.0), DeviceHello("d", 0, 1), 0.0)
    for number in range(1, 10):
        assert isinstance(actions[-1], StartRound) and actions[-1].round.number == number
        state, _ = machine.step(rules, state, states.Answered("d", True), 1.0)
        state, actions = machine.step(rules, state, ModelReady("v", failed="worse", undone=True), 1.0)
        assert state.refused == 0 and state.position == 0 and state.base == 0
    assert state.phase == "done"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rollback_accuracy": 1.0}, "round.rollback_accuracy"),
        ({"rollback_loss": 0.5}, "choose one above 1"),
        ({"rollback_accuracy": 0.2, "evaluate_every": 2}, "evaluate_every is 2: set it to 1"),
        ({"rollback_loss": 3, "evaluate_every": 0}, "evaluate_every is 0: set it to 1"),
    ],
)
def test_a_rule_that_cannot_be_is_refused_where_it_is_written(table: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse({"round": table}, source="x")

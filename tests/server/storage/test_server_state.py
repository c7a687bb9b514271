"""What the server keeps beside the model: its names, its place in updates, and the step that changes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from edgefl.contract import server_state
from edgefl.contract.server import MEAN, Scalars, ServerOpt
from edgefl.contract.tensors import Tensors
from edgefl.wire.regions import BlockRegion, Placement
from edgefl_server.run_spec import ExchangeSpec, RunSpec, TierSpec
from tests.server.fleet import bundle
from tests.support.errors import ServerStepError, refuses

WEIGHTS = {
    "conv.weight": np.ones((2, 3), np.float32),
    "conv.running_mean": np.zeros(2, np.float32),
    "head.weight": np.full(4, 2.0, np.float32),
}
TRAINED = frozenset({"conv.weight", "head.weight"})


def _squares(update: Tensors) -> Tensors:
    return update | {"v" + name[1:]: tensor**2 for name, tensor in update.items() if name.startswith("m/")}


def _step(before: Tensors, mean: Tensors, hyper: Scalars) -> Tensors:
    return {"head.weight": before["head.weight"] - hyper["eta"] * mean["m/head.weight"]}


def test_memory_has_a_tensor_for_each_trained_parameter() -> None:
    made = server_state.initial({"m": 0.0, "v": 0.25}, WEIGHTS, TRAINED)
    assert sorted(made) == ["m/conv.weight", "m/head.weight", "v/conv.weight", "v/head.weight"]
    assert made["v/conv.weight"].shape == (2, 3) and (made["v/conv.weight"] == 0.25).all()
    assert server_state.units_of(["m", "v"], ["stem", "conv", "head"], TRAINED) == (
        "m/conv",
        "m/head",
        "v/conv",
        "v/head",
    )


def test_the_model_is_what_is_left_without_the_memory() -> None:
    both = WEIGHTS | server_state.initial({"m": 0.0}, WEIGHTS, TRAINED)
    assert server_state.model_of(both, ("m",)).keys() == WEIGHTS.keys()
    assert server_state.states_of(["head.weight", "m/head.weight", "m/conv.weight"], ("m", "v")) == ("", "m")


def test_memory_lies_in_an_update_where_the_weights_lie() -> None:
    part = BlockRegion.leading(1, 3)
    placement = Placement({"conv.weight": part, "conv.running_mean": BlockRegion.leading(1)})
    found = server_state.regions_of(placement, ["", "m"], TRAINED)
    assert (
        found.keys() == {"conv.weight", "conv.running_mean", "m/conv.weight"}
        and found["m/conv.weight"] is part
    )


def test_what_is_averaged_may_hold_more_than_what_travelled() -> None:
    opening = ServerOpt("opening", {"m": 0.0, "v": 0.0}, unfold=_squares)
    assert server_state.unfolded_states(opening, ("m",), sorted(TRAINED)) == ("m", "v")
    found = opening.unfolded({"m/head.weight": np.array([1.0, -3.0], np.float32)})
    np.testing.assert_array_equal(found["v/head.weight"], [1.0, 9.0])
    assert server_state.unfolded_states(MEAN, ("", "m"), sorted(TRAINED)) == ("", "m")


def test_the_step_replaces_what_it_names_and_leaves_the_mean_elsewhere() -> None:
    before = WEIGHTS | server_state.initial({"m": 0.0}, WEIGHTS, TRAINED)
    mean = before | {"m/head.weight": np.ones(4, np.float32), "conv.running_mean": np.ones(2, np.float32)}
    after = server_state.apply_server_step(ServerOpt("sgd", {"m": 0.0}, _step), before, mean, {"eta": 0.5})
    np.testing.assert_array_equal(after["head.weight"], np.full(4, 1.5))
    np.testing.assert_array_equal(after["conv.running_mean"], np.ones(2))
    np.testing.assert_array_equal(before["head.weight"], np.full(4, 2.0), "the step changed its input")


def test_a_step_that_diverges_is_an_error_and_no_model() -> None:
    broken = ServerOpt("broken", step=lambda before, *_: {"head.weight": before["head.weight"] * torch.inf})
    with refuses(ServerStepError, step="broken", name="head.weight"):
        server_state.apply_server_step(broken, WEIGHTS, WEIGHTS, {})


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (lambda *_: {"head.bias": torch.zeros(4)}, "gives 'head.bias', which is neither of the model nor"),
        (lambda *_: {"head.weight": torch.zeros(())}, r"gives head.weight the shape \(\) instead of \(4,\)"),
        (lambda *_: {"head.weight": torch.full((4,), 2.0**21)}, "larger than 1048576"),
        (lambda *_: 1 / 0, "failed: ZeroDivisionError"),
    ],
)
def test_a_step_that_gives_what_is_no_model_is_an_error(step: Any, told: str) -> None:
    with pytest.raises(ServerStepError, match=told):
        server_state.apply_server_step(ServerOpt("wrong", step=step), WEIGHTS, WEIGHTS, {})


def test_a_step_in_double_precision_leaves_the_model_as_it_was_stored() -> None:
    wide = ServerOpt("wide", step=lambda before, *_: {"head.weight": before["head.weight"].double() / 3})
    assert server_state.apply_server_step(wide, WEIGHTS, WEIGHTS, {})["head.weight"].dtype == np.float32


def test_an_update_is_unfolded_also_where_the_names_stay() -> None:
    squares = ServerOpt("squares", unfold=lambda update: {name: tensor**2 for name, tensor in update.items()})
    tier, placement = {"t": TierSpec(bundle("strong"), None)}, Placement(dict.fromkeys(WEIGHTS))  # type: ignore[arg-type]
    assert ExchangeSpec(tier, {}, server=squares).update_layout("t", placement, TRAINED).unfolds
    assert not ExchangeSpec(tier, {}).update_layout("t", placement, TRAINED).unfolds


def test_exchanges_open_once_and_then_take_turns() -> None:
    opening, ahead = ExchangeSpec({}, {"lr": 1.0}), ExchangeSpec({}, {"lr": 2.0})
    plan = RunSpec("f", "", None, {}, (), {}, {"lr": 3.0}, opening=(opening,), ahead=(ahead,))  # type: ignore[arg-type]
    assert [plan.exchange(position).hyper["lr"] for position in range(6)] == [1.0, 2.0, 3.0, 2.0, 3.0, 2.0]

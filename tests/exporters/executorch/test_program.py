"""Whole steps as ExecuTorch programs: beside torch, in place, the same bytes each time, with memory known in advance."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.artifact import Artifact
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.executorch.arena import ALIGNMENT, Lifetime, align, plan_arena
from edgefl_export.executorch.check.programs import load, verify
from edgefl_export.executorch.graph import to_kernel_ops
from edgefl_export.executorch.program.partition import steps_of
from edgefl_export.executorch.program.write import LEAST_BYTES, to_executorch
from edgefl_export.executorch.target import ExecuTorchTarget
from edgefl_export.memory.recompute import Budget
from edgefl_export.operators import AFTER
from edgefl_export.verify.graphs import compare
from tests.exporters.examples import pointwise, small_net, step_of
from tests.parity.forms import runner_of


def momentum() -> Function:
    """w and m move; the old m is read by the new one alone, the old w also by a metric."""

    def fn(t: Tensors) -> Tensors:
        m = 0.9 * t["state.m"] + t["batch.0.g"]
        w = t["state.w"] - t["hyper.lr"] * m
        return {"state.m": m, "state.w": w, "metric.old": t["state.w"].sum()}

    shapes = {"state.m": (4, 3), "state.w": (4, 3), "batch.0.g": (4, 3), "hyper.lr": ()}
    return Function("train", fn, {name: TensorSpec(shape) for name, shape in shapes.items()})


def swap() -> Function:
    """Each new value needs the other's old one; the second also its own, transposed."""

    def fn(t: Tensors) -> Tensors:
        a, b = t["state.a"], t["state.b"]
        return {"state.a": a @ b, "state.b": b.t() + 2 * b}

    return Function("train", fn, {name: TensorSpec((3, 3)) for name in ("state.a", "state.b")})


@functools.cache
def network() -> LoweredGraph:
    return ExecuTorchTarget().capture(step_of(small_net(), (3, 8, 8)))


@functools.cache
def network_program() -> Artifact:
    return to_executorch(network())


def test_a_step_of_a_network_equals_torch() -> None:
    assert verify(network().function, network_program().model, 1).worst < 1e-4


def test_equal_functions_give_equal_bytes() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    assert to_executorch(capture(step_of(net, (6,)))) == to_executorch(capture(step_of(net, (6,))))


def test_a_network_runs_on_few_delegates_with_all_of_its_products() -> None:
    steps = steps_of(to_kernel_ops(network()))

    delegates = [step for step in steps if step.delegated]
    assert len(delegates) <= 4
    assert sum(len(step.nodes) for step in delegates) > 5 * (len(steps) - len(delegates))
    assert not any("mm" in str(step.nodes[0].target) for step in steps if not step.delegated)


def test_reads_come_after_writes_in_every_order() -> None:
    module = to_kernel_ops(network())
    written: set[object] = set(module.graph.find_nodes(op="placeholder"))
    done = {node for step in steps_of(module) for node in step.nodes}
    for step in steps_of(module):
        for node in step.nodes:
            assert all(read in written for read in node.all_input_nodes if read in done)
            written.add(node)
    assert len(done) == sum(len(step.nodes) for step in steps_of(module))


def test_state_that_nobody_reads_later_is_written_in_place() -> None:
    artifact = to_executorch(capture(momentum()))

    assert "state.m" in artifact.in_place


def test_state_that_is_read_after_it_is_written_is_not_in_place() -> None:
    assert to_executorch(capture(swap())).in_place == ()


@pytest.mark.parametrize("function", [momentum(), step_of(nn.Linear(6, 3), (6,))], ids=["momentum", "linear"])
def test_state_in_place_gives_the_values_of_state_apart(function: Function) -> None:
    given = function.example(2)
    expected = function(given)
    found = runner_of("executorch", function)(given)

    assert to_executorch(ExecuTorchTarget().capture(function)).in_place
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), rtol=1e-5, atol=1e-6)


CLAMPED = {
    "relu": lambda w, x: (w @ x).relu(),
    "relu of the right factor": lambda w, x: (x @ w).relu(),
    "relu6": lambda w, x: F.relu6(w @ x),
    "clamp": lambda w, x: (w @ x).clamp(0.1, 2.0),
    "two clamps": lambda w, x: (w @ x).clamp(0.1, 2.0).clamp(0.2, 1.0),
    "linear": lambda w, x: F.linear(w, x).relu(),
    "seen in another shape": lambda w, x: (w @ x).view(32, 128).relu().view(64, 64),
}


@pytest.mark.parametrize("name", CLAMPED)
def test_a_product_that_is_clamped_does_not_write_over_its_own_factor(name: str) -> None:
    def step(t: Tensors) -> Tensors:
        return {"state.w": CLAMPED[name](t["state.w"], t["batch.0.x"])}

    function = pointwise(step, state__w=(64, 64), batch__0__x=(64, 64))
    given = function.example(2)

    found = runner_of("executorch", function)(given)

    np.testing.assert_allclose(found["state.w"], function(given)["state.w"].numpy(), rtol=1e-4, atol=1e-4)


LATE_READERS = {
    "a product": lambda w, h, x: (x @ w).relu(),
    "a product, clamped twice": lambda w, h, x: (x @ w).clamp(-1.0, 1.0).relu(),
    "a product, seen in another shape": lambda w, h, x: (x @ w).view(4096).relu().view(64, 64),
    "a sum": lambda w, h, x: (x + w).relu(),
    "a sum with the old state": lambda w, h, x: (h + x).relu(),
    "clamps alone": lambda w, h, x: x.clamp(-1.0, 1.0).relu(),
}


@pytest.mark.parametrize("name", LATE_READERS)
def test_clamped_state_is_not_written_before_it_is_read(name: str) -> None:
    """XNNPACK runs a clamp as a part of what comes before it, and writes the state as early as that runs."""

    def step(t: Tensors) -> Tensors:
        w, h, x = t["batch.0.w"], t["state.h"], t["batch.0.x"]
        first = {"a product": x @ w, "a sum": x + w}.get(name.partition(",")[0])
        new = LATE_READERS[name](w, h, x)
        drift = (h**2).mean() + (h.exp() * 0.5).sum() if first is None else (h**2 + first * 0.1).mean()
        return {"state.h": new, "metric.drift": drift}

    function = pointwise(step, state__h=(64, 64), batch__0__x=(64, 64), batch__0__w=(64, 64))
    given = function.example(2)

    found = runner_of("executorch", function)(given)

    expected = function(given)
    np.testing.assert_allclose(found["state.h"], expected["state.h"].numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["metric.drift"], expected["metric.drift"].numpy(), rtol=1e-4, atol=1e-4)


def test_the_clamp_that_writes_state_counts_from_where_its_product_runs() -> None:
    def step(t: Tensors) -> Tensors:
        y = t["batch.0.x"] @ t["batch.0.w"]
        return {"state.h": y.relu(), "metric.drift": (t["state.h"] ** 2).mean()}

    square = dict.fromkeys(("state__h", "batch__0__x", "batch__0__w"), (64, 64))
    assert to_executorch(capture(pointwise(step, **square))).in_place == ()


@pytest.mark.parametrize("shape", [(1001, 1001), (17, 4099), (131101,)])
def test_sums_of_a_large_odd_count_take_no_constant_of_it(shape: tuple[int, ...]) -> None:
    function = pointwise(lambda t: {"metric.y": (t["batch.0.x"] ** 2).mean()}, batch__0__x=shape)

    made = to_executorch(capture(function))

    assert len(made.model) < 100_000
    assert verify(function, made.model, 1).worst < 5e-5


def test_a_sum_over_a_single_number_is_that_number() -> None:
    function = pointwise(
        lambda t: {"metric.y": (t["batch.0.x"].mean().sum(0) * 2).mean(-1) + 1}, batch__0__x=(3, 4)
    )

    assert verify(function, to_executorch(capture(function)).model, 1).worst < 1e-6


def test_an_input_that_is_turned_there_and_back_has_memory_of_its_own() -> None:
    def fn(t: Tensors) -> Tensors:
        x = t["batch.0.x"]
        y = x * 2
        return {
            "metric.x": x.permute(0, 2, 1).permute(0, 2, 1),
            "metric.y": y.permute(0, 2, 1).permute(0, 2, 1),
            "metric.z": y,
            "metric.pooled": F.max_pool2d(x[None], 1),
        }

    function = pointwise(fn, batch__0__x=(2, 3, 4))

    assert verify(function, to_executorch(capture(function)).model, 1).worst == 0


def test_a_call_that_only_orders_costs_nothing() -> None:
    function = pointwise(
        lambda t: {"metric.y": AFTER(t["batch.0.x"], t["batch.0.z"]) * 2}, batch__0__x=(3,), batch__0__z=(2,)
    )

    assert verify(function, to_executorch(capture(function)).model, 1).worst == 0


def test_an_output_that_is_an_input_has_memory_of_its_own() -> None:
    def fn(t: Tensors) -> Tensors:
        y = t["batch.0.x"] * 2
        return {"metric.x": t["batch.0.x"], "metric.y": y, "metric.z": y, "metric.flat": y.reshape(6)}

    function = pointwise(fn, batch__0__x=(2, 3))

    assert verify(function, to_executorch(capture(function)).model, 1).worst == 0


def test_a_view_that_is_an_output_keeps_its_value_while_others_are_made() -> None:
    def fn(t: Tensors) -> Tensors:
        y = (t["batch.0.x"] > 0).to(torch.int32)
        z = (y + 5) * y + 3
        values, places = (z + 1).topk(2, 1)
        return {"metric.view": y.reshape(6), "metric.z": (z - 1) * z, "metric.v": values, "metric.p": places}

    function = pointwise(fn, batch__0__x=(2, 3))

    assert verify(function, to_executorch(capture(function)).model, 1).worst == 0


def test_a_loaded_program_outlives_the_bytes_it_was_loaded_from() -> None:
    function = network().function
    run = load(function, bytes(bytearray(network_program().model)))
    taken = [bytes(40_000) for _ in range(200)]

    assert compare(function, run, 1).worst < 1e-4
    assert taken


def test_planned_bytes_grow_with_the_batch_and_hold_inputs_and_outputs() -> None:
    def planned(rows: int) -> int:
        function = pointwise(
            lambda t: {"metric.y": (t["batch.0.x"] @ t["weights.w"]).relu() * 2},
            batch__0__x=(rows, 64),
            weights__w=(64, 64),
        )
        return to_executorch(capture(function)).planned_bytes

    assert planned(65536) - planned(32768) >= 2 * 32768 * 64 * 4
    assert planned(2) == LEAST_BYTES


# -- the arena ---------------------------------------------------------------------------------------------


spans = st.builds(
    lambda size, first, length: Lifetime(size, first, first + length),
    st.integers(1, 5000),
    st.integers(0, 30),
    st.integers(0, 12),
)


@given(st.lists(spans, max_size=40))
def test_values_that_live_at_once_never_overlap(found: list[Lifetime]) -> None:
    offsets, _ = plan_arena(dict(enumerate(found)))

    for a in offsets:
        for b in offsets:
            if a < b and found[a].first <= found[b].last and found[b].first <= found[a].last:
                assert offsets[a] + found[a].size <= offsets[b] or offsets[b] + found[b].size <= offsets[a]


@given(st.lists(spans, max_size=40))
def test_the_arena_ends_where_the_last_value_ends(found: list[Lifetime]) -> None:
    offsets, total = plan_arena(dict(enumerate(found)))
    most = max(
        (sum(align(s.size) for s in found if s.first <= turn <= s.last) for turn in range(60)), default=0
    )

    assert total == max((offsets[key] + align(found[key].size) for key in offsets), default=0)
    assert total >= most
    assert all(offset % ALIGNMENT == 0 for offset in offsets.values())


def test_memory_of_a_dead_value_is_used_again() -> None:
    offsets, total = plan_arena({"a": Lifetime(640, 0, 1), "b": Lifetime(640, 2, 3), "c": Lifetime(64, 0, 3)})

    assert offsets["a"] == offsets["b"]
    assert total == 704


def test_a_small_value_lies_in_the_smallest_gap() -> None:
    row = {
        "a": Lifetime(6400, 0, 9),
        "b": Lifetime(3200, 0, 1),
        "c": Lifetime(1600, 0, 9),
        "d": Lifetime(640, 0, 1),
        "e": Lifetime(320, 0, 9),
    }
    offsets, _ = plan_arena({**row, "new": Lifetime(64, 5, 6)})

    assert offsets["new"] == offsets["d"]


# -- memory budgets of ExecuTorch programs -----------------------------------------------------------------


@functools.cache
def step() -> Function:
    objective = Objective.of(OutputSide(build_model("elu_mlp", size=2, hidden=(64, 64, 64)), 0))
    return algorithms.build("sgd", objective, batch=8192).phases[0].function


@functools.cache
def plain() -> Artifact:
    form = target_of("executorch")
    return form.emit(form.capture(step()))


def within(budget: Budget) -> Artifact:
    form = target_of("executorch")
    return form.emit(form.capture(step()), budget)


@pytest.mark.slow
def test_a_budget_that_the_program_keeps_anyway_changes_nothing() -> None:
    artifact = within(Budget(plain().planned_bytes))

    assert artifact.memory_budget == plain().planned_bytes
    assert artifact.model == plain().model


@pytest.mark.slow
def test_a_share_is_one_of_what_the_program_plans() -> None:
    artifact = within(Budget(0.97, relative=True))

    assert artifact.memory_budget == int(0.97 * plain().planned_bytes)
    assert artifact.planned_bytes <= artifact.memory_budget < plain().planned_bytes


@pytest.mark.slow
def test_a_step_with_less_memory_computes_what_torch_computes() -> None:
    artifact = within(Budget(0.97, relative=True))

    assert target_of("executorch").verify(step(), artifact.model, 1).worst < 1e-4


@pytest.mark.slow
def test_an_impossible_budget_is_refused_with_the_least() -> None:
    with pytest.raises(ExportError, match=r"does not fit a memory budget") as caught:
        within(Budget(LEAST_BYTES - 1024))

    smallest = int(caught.value.details["smallest"])  # type: ignore[call-overload]
    assert LEAST_BYTES < smallest < plain().planned_bytes
    assert within(Budget(smallest)).planned_bytes == smallest

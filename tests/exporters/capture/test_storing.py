"""Steps whose values wait in halves: less waits in the graphs that devices get, and the numbers are those of torch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import fx

from edgefl import algorithms
from edgefl.algorithms.activations import store_activations
from edgefl.contract.algorithm import Function
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.rewrites import half_stores
from edgefl_export.compiler.compiler import target_of
from edgefl_export.executorch.graph import to_kernel_ops
from edgefl_export.executorch.program.partition import end_of_forward, recompute
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import Budget
from edgefl_export.memory.usage import SMALL_BYTES, size, timeline
from edgefl_export.operators import AFTER
from tests.parity.forms import checked
from tests.rings.rows import mostly_slow

MODELS: dict[str, tuple[dict[str, object], int]] = {
    "resnet8": ({"size": 32}, 32),
    "vit": ({"size": 32, "width": 48, "depth": 2, "rate": 0.1}, 32),
}
SHARE = {"resnet8": 0.51, "vit": 0.42}
"""Of the bytes that wait: half of those of values, and a quarter of those of masks."""


def step(model: str, activations: str) -> Function:
    options, batch = MODELS[model]
    objective = Objective.of(OutputSide(build_model(model, **options), 0))
    return store_activations(algorithms.build("sgd", objective, batch=batch), activations).phases[0].function


@functools.cache
def lowered(model: str, activations: str, form: str = "onnx") -> LoweredGraph:
    return target_of(form).capture(step(model, activations))


def waiting(module: fx.GraphModule, last: fx.Node) -> list[fx.Node]:
    """Large values that the forward pass, which ends with ``last``, has made and the backward pass reads."""
    line = timeline(module)
    turn = line.position[last]
    return [
        node
        for node in line.nodes[: turn + 1]
        if node.op == "call_function"
        and line.owner[node] is node
        and isinstance(node.meta["val"], torch.Tensor)
        and size(node) >= SMALL_BYTES
        and any(at > turn for at in line.reads[node])
        and not _is_weight(node)
    ]


def _is_weight(node: fx.Node) -> bool:
    """A weight in another order waits, too."""
    return node.target is torch.ops.aten.permute.default and node.all_input_nodes[0].op == "placeholder"


def bytes_that_wait(made: LoweredGraph) -> int:
    last = end_of_forward(made, made.module)
    assert last is not None
    return sum(map(size, waiting(made.module, last)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_half_the_bytes_wait_and_the_prediction_follows(model: str) -> None:
    plain, half = lowered(model, "float32"), lowered(model, "float16")
    before, after = bytes_that_wait(plain), bytes_that_wait(half)

    assert after <= SHARE[model] * before
    assert timeline(half.module).peak < timeline(plain.module).peak - 0.7 * (before - after)
    assert predicted_peak(half) < predicted_peak(plain) - 0.15 * (before - after)


def test_every_store_comes_right_behind_its_value() -> None:
    graph = lowered("resnet8", "float16").module.graph
    assert half_stores(graph)
    for store in half_stores(graph):
        value = store.args[0]
        assert store.prev is value
        readers = {user for user in value.users if user.target is not AFTER}
        assert readers == {store}


def test_masks_of_dropout_wait_as_a_byte_for_each_entry() -> None:
    half = lowered("vit", "float16")
    last = end_of_forward(half, half.module)
    assert last is not None
    kinds = {node.meta["val"].dtype for node in waiting(half.module, last)}
    assert kinds == {torch.float16, torch.bool}


def test_a_step_without_halves_is_left_alone() -> None:
    targets = {node.target for node in lowered("vit", "float32").module.graph.nodes}
    assert AFTER not in targets


@pytest.mark.slow
@pytest.mark.parametrize("model", mostly_slow(sorted(MODELS), ["vit"]))
def test_executorch_keeps_halves_and_computes_the_rest_again(model: str) -> None:
    kept = {}
    for activations in ("float32", "float16"):
        made = lowered(model, activations, "executorch")
        module = to_kernel_ops(made)
        last = end_of_forward(made, module)
        assert last is not None
        recompute(module, last)
        kept[activations] = sum(map(size, waiting(module, last)))
    assert kept["float16"] < 0.8 * kept["float32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "form"),
    mostly_slow(
        [("resnet8", "onnx"), ("vit", "onnx"), ("vit", "executorch")],
        [("resnet8", "onnx"), ("vit", "executorch")],
    ),
)
def test_graphs_round_as_torch_rounds(model: str, form: str) -> None:
    assert checked(form, step(model, "float16"), 1).worst <= 1e-3


@pytest.mark.slow
def test_a_budget_takes_a_step_with_halves_further() -> None:
    form, function = target_of("onnx"), step("resnet8", "float16")
    plain = form.emit(form.capture(function))
    tight = form.emit(form.capture(function), Budget(0.9, relative=True))

    assert tight.planned_bytes < plain.planned_bytes
    assert form.verify(function, tight.model, 1, tight.in_place).worst <= 1e-3

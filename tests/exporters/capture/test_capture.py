"""The traced graph: pure, only core ops, only what outputs need."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from tests.exporters.examples import pointwise, small_net, step_of


def targets(lowered: LoweredGraph) -> list[str]:
    return [str(node.target) for node in lowered.module.graph.nodes if node.op == "call_function"]


@functools.cache
def network() -> LoweredGraph:
    return capture(step_of(small_net(), (3, 6, 6)))


def test_captured_graph_equals_the_function_in_torch() -> None:
    function = network().function
    example = function.example(3)
    expected = function(example)

    found = network()(example)

    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


def test_no_training_op_and_no_in_place_op_is_left() -> None:
    names = targets(network())

    assert not [n for n in names if "backward" in n]
    assert not [n for n in names if n.startswith("aten.") and n.split(".")[1].endswith("_")]


def test_running_statistics_come_out_although_batch_norm_hides_its_write() -> None:
    function = step_of(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)), (3,))
    example = function.example(1)

    found = capture(function)(example)

    x, old = example["batch.0.x"], example["state.0.running_var"]
    torch.testing.assert_close(found["state.0.running_var"], 0.9 * old + 0.1 * x.var(0))
    torch.testing.assert_close(
        found["state.0.running_mean"], 0.9 * example["state.0.running_mean"] + 0.1 * x.mean(0)
    )


def test_capture_leaves_the_module_outside_alone() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = {name: value.clone() for name, value in module.state_dict().items()}

    capture(step_of(module, (3,)))

    for name, value in module.state_dict().items():
        if "num_batches" not in name:  # a counter that nobody reads
            assert torch.equal(value, before[name]), name


def test_suffix_never_computes_the_gradient_of_its_boundary_input() -> None:
    def convolutions(module: nn.Sequential) -> int:
        """Forward and input gradients; weight gradients have the samples as groups."""
        nodes = capture(step_of(module, (3, 6, 6))).module.graph.nodes
        return sum(node.args[-1] == 1 for node in nodes if "aten.convolution." in str(node.target))

    one = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.Linear(96, 3))
    two = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(24, 3))

    assert convolutions(one) == 1  # forward only: neither an input gradient nor one for x
    assert convolutions(two) == 3  # two forward, one gradient between the layers


def test_unused_inputs_are_dropped_and_reported() -> None:
    function = pointwise(lambda t: {"state.w": t["state.w"] * 2}, state__w=(3,), hyper__lr=())

    lowered = capture(function)

    assert list(lowered.inputs) == ["state.w"]
    assert lowered.unused == ("hyper.lr",)


def test_a_weight_in_the_closure_is_refused() -> None:
    layer = nn.Linear(3, 3)

    with pytest.raises(ExportError, match="not among its inputs") as caught:
        capture(pointwise(lambda t: {"metric.y": layer(t["batch.0.x"]).sum().detach()}, batch__0__x=(2, 3)))

    assert caught.value.details["shape"] == (3, 3)


def test_a_small_constant_in_the_closure_is_kept() -> None:
    shift = torch.tensor([1.0, 2.0, 3.0])
    function = pointwise(lambda t: {"record.x": t["batch.0.x"] + shift}, batch__0__x=(2, 3))

    example = function.example(0)

    assert torch.equal(capture(function)(example)["record.x"], example["batch.0.x"] + shift)


def test_writing_to_a_tensor_outside_is_refused() -> None:
    memory = torch.zeros(3)

    def fn(t: Tensors) -> Tensors:
        memory.add_(t["state.w"])
        return {"state.w": memory * 2}

    with pytest.raises(ExportError, match="changes a tensor that is not among its inputs"):
        capture(pointwise(fn, state__w=(3,)))


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda t: {"state.w": t["state.w"] * t["state.w"].sum().item()}, "cannot be traced"),
        (lambda t: {"weight.w": t["state.w"]}, "no known role"),
        (lambda t: {"metric.loss": 1.0}, "are no tensors"),
        (lambda t: {}, "non-empty dict"),
    ],
)
def test_breach_of_the_contract_is_told(fn: object, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        capture(pointwise(fn, state__w=(3,)))  # type: ignore[arg-type]


def test_an_input_without_role_is_refused() -> None:
    function = Function("example", lambda t: {"metric.x": t["x"].sum()}, {"x": TensorSpec((2,))})

    with pytest.raises(ExportError, match="no known role"):
        capture(function)

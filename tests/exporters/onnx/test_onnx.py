"""The ONNX bytes: standard, without weights, deterministic, and complete. Traps met before have a test each."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl_export.capture.trace import capture, exported_program
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import op_types, pointwise, small_net, step_of


@pytest.fixture(scope="module")
def step() -> Function:
    return step_of(small_net(), (3, 6, 6))


@pytest.fixture(scope="module")
def model(step: Function) -> bytes:
    return to_onnx(capture(step))


def run(model: bytes, example: Tensors) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {port.name: example[port.name].numpy() for port in session.get_inputs()})


def test_model_is_valid_and_uses_standard_ops_only(model: bytes) -> None:
    proto = onnx.load_from_string(model)

    onnx.checker.check_model(proto, full_check=True)
    assert [(item.domain, item.version) for item in proto.opset_import] == [("", 18)]
    assert not proto.functions and {node.domain for node in proto.graph.node} == {""}


def test_ports_keep_names_order_and_static_shapes(step: Function, model: bytes) -> None:
    graph = onnx.load_from_string(model).graph
    shapes = {v.name: tuple(d.dim_value for d in v.type.tensor_type.shape.dim) for v in graph.input}

    assert shapes == {name: spec.shape for name, spec in step.inputs.items()}
    outputs = [value.name.removesuffix(".next") for value in graph.output]
    assert outputs == list(step(step.example(0)))


def test_trap_gradients_vanish_when_outputs_are_not_plain_user_outputs(step: Function, model: bytes) -> None:
    algorithm = exported_program(capture(step))
    example = step.example(5)

    kinds = {spec.kind.name for spec in algorithm.graph_signature.output_specs}
    results = dict(zip(step(example), run(model, example), strict=True))

    assert kinds == {"USER_OUTPUT"}
    weights = [name for name in results if name.endswith("weight")]
    assert len(weights) == 5
    for name in weights:
        assert np.abs(results[name] - example[name].numpy()).max() > 0, f"{name} did not move"


def test_trap_no_weight_is_folded_and_no_input_renamed(step: Function, model: bytes) -> None:
    graph = onnx.load_from_string(model).graph
    constants = {item.name: onnx.numpy_helper.to_array(item) for item in graph.initializer}

    assert [value.name for value in graph.input] == list(step.inputs)
    assert not set(constants) & set(step.inputs)
    assert max(value.size for value in constants.values()) <= 8


def test_trap_batch_norm_in_training_is_not_mapped_to_inference(model: bytes, step: Function) -> None:
    example = step.example(2)
    other = dict(example)
    for name in step.inputs:
        if "running" in name:
            other[name] = example[name] + 3.0

    one, two = (dict(zip(step(example), run(model, e), strict=True)) for e in (example, other))

    assert one["metric.loss"] == two["metric.loss"]  # batch statistics only
    assert np.abs(one["state.1.running_mean"] - two["state.1.running_mean"]).min() > 1  # yet they are kept


def test_trap_the_caller_s_arrays_are_not_written_to(step: Function, model: bytes) -> None:
    example = step.example(4)
    before = {name: value.clone() for name, value in example.items()}

    run(model, example)

    for name, value in example.items():
        assert torch.equal(value, before[name]), name


def test_equal_functions_give_equal_bytes(step: Function, model: bytes) -> None:
    assert to_onnx(capture(step_of(small_net(), (3, 6, 6)))) == model


def test_bytes_tell_nothing_of_the_machine(model: bytes) -> None:
    proto = onnx.load_from_string(model)

    for secret in (str(Path.home()), str(Path(__file__).parents[3]), socket.gethostname(), torch.__version__):
        assert secret.encode() not in model
    assert not proto.metadata_props and not proto.doc_string
    assert not any(node.doc_string or node.metadata_props for node in proto.graph.node)


def test_passed_through_and_repeated_tensors_come_out() -> None:
    def fn(t: Tensors) -> Tensors:
        doubled = t["state.w"] * 2
        return {
            "state.w": t["state.w"],
            "update.w": t["state.w"],
            "carry.w": doubled,
            "state.v": doubled,
            "state.n": torch.zeros(3),
            "metric.last": doubled[-1],
        }

    function = pointwise(fn, state__w=(3,))
    model = to_onnx(capture(function))

    verify(function, model, 0)
    assert len(onnx.load_from_string(model).graph.output) == 6


def test_integers_and_labels_pass() -> None:
    def fn(t: Tensors) -> Tensors:
        hits = (t["batch.0.x"].argmax(1) == t["batch.0.y"]).float()
        return {"metric.correct": hits.sum(), "record.y": t["batch.0.y"] + 1}

    ports = {"batch.0.x": TensorSpec((6, 3)), "batch.0.y": TensorSpec((6,), torch.int64)}
    function = Function("count", fn, ports, label_range=3)

    verify(function, to_onnx(capture(function)), 0)


def test_ops_of_mixed_types_get_their_casts() -> None:
    def mixed(t: Tensors) -> Tensors:
        whole, x = t["batch.0.y"], t["state.x"]
        chosen = torch.where(whole > 1, whole, x)
        return {
            "state.product": whole * x + (whole > 0),
            "state.ratio": whole / (whole + 1),
            "state.chosen": chosen.pow(2) + whole.pow(2),
            "state.stacked": torch.cat([whole, x]) * 2,
            "metric.same": (whole == x).sum(),
        }

    inputs = {"batch.0.y": TensorSpec((4,), torch.int64), "state.x": TensorSpec((4,))}
    function = Function("mixed", mixed, inputs, label_range=3)
    model, example = to_onnx(capture(function)), function.example(3)
    example["state.x"][0] = example["batch.0.y"][0].float()

    for ours, theirs in zip(run(model, example), function(example).values(), strict=True):
        assert ours.dtype == theirs.numpy().dtype
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_gradients_by_torch_func_export_as_well() -> None:
    module = nn.Linear(3, 2)

    def fn(t: Tensors) -> Tensors:
        def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(module, w, (t["batch.0.x"],)).square().mean()

        grads, value = torch.func.grad_and_value(loss)({"weight": t["state.weight"], "bias": t["state.bias"]})
        return {**{f"state.{k}": t[f"state.{k}"] - g for k, g in grads.items()}, "metric.loss": value}

    function = pointwise(fn, state__weight=(2, 3), state__bias=(2,), batch__0__x=(4, 3))

    verify(function, to_onnx(capture(function)), 0)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x)  # no ONNX form


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), Odd())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_op_without_rule_is_named_with_module_and_line() -> None:
    module = Holder()
    function = pointwise(lambda t: {"record.y": module(t["batch.0.x"])}, batch__0__x=(2, 3))

    with pytest.raises(ExportError) as caught:
        to_onnx(capture(function))

    details = caught.value.details
    assert details["op"] == "aten.special_bessel_j0.default"
    assert details["module"] == "inner.1 (Odd)"
    line = (
        Path(__file__)
        .read_text()
        .splitlines()
        .index("        return torch.special.bessel_j0(x)  # no ONNX form")
    )
    assert details["source"] == f"{__file__}:{line + 1}"
    assert "exporters/edgefl_export/decompositions" in str(caught.value)


def test_op_outside_the_core_set_is_decomposed_by_torch() -> None:
    function = pointwise(
        lambda t: {"record.y": torch.logaddexp(t["batch.0.x"], t["batch.1.x"])},
        batch__0__x=(2, 3),
        batch__1__x=(2, 3),
    )

    verify(function, to_onnx(capture(function)), 0)


@pytest.mark.parametrize(
    ("shape", "options"), [((3, 2, 512), {"dim": -1}), ((5, 1000), {"dim": 1, "keepdim": True})]
)
def test_the_largest_of_many_is_the_first(shape: tuple[int, ...], options: dict[str, int]) -> None:
    """Found in two steps, among numbers of which many are the largest."""
    function = pointwise(lambda t: {"metric.place": t["batch.x"].round().argmax(**options)}, batch__x=shape)  # type: ignore[arg-type]
    model, example = to_onnx(capture(function)), function.example(3)

    assert op_types(model).count("ArgMax") == 2
    found = run(model, example)[0]
    np.testing.assert_array_equal(found, example["batch.x"].round().numpy().argmax(-1).reshape(found.shape))
    assert found.shape == function(example)["metric.place"].shape


@pytest.mark.parametrize("options", [{}, {"keepdim": True}, {"dim": 0}, {"dim": 1}])
def test_the_place_of_the_largest_along_any_axis(options: dict[str, int]) -> None:
    function = pointwise(lambda t: {"metric.place": t["batch.x"].argmax(**options)}, batch__x=(4, 600))  # type: ignore[arg-type]
    example = function.example(1)

    np.testing.assert_array_equal(
        run(to_onnx(capture(function)), example)[0], function(example)["metric.place"].numpy()
    )


def test_the_place_of_a_single_number() -> None:
    function = pointwise(lambda t: {"metric.place": t["batch.x"].argmax(0)}, batch__x=())

    assert run(to_onnx(capture(function)), function.example(1))[0].shape == ()

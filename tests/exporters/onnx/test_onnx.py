"""The ONNX bytes: standard, without weights, deterministic, and complete. Traps met before have a test each."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.trace import capture, exported_program
from edgefl_export.compiler.compiler import target_of
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import op_types, pointwise, run_onnx, small_net, step_of
from tests.support.errors import ExportError, refuses


@pytest.fixture(scope="module")
def step() -> Function:
    return step_of(small_net(), (3, 6, 6))


@pytest.fixture(scope="module")
def model(step: Function) -> bytes:
    return to_onnx(capture(step))


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
    results = dict(zip(step(example), run_onnx(model, example), strict=True))

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

    one, two = (dict(zip(step(example), run_onnx(model, e), strict=True)) for e in (example, other))

    assert one["metric.loss"] == two["metric.loss"]  # batch statistics only
    assert np.abs(one["state.1.running_mean"] - two["state.1.running_mean"]).min() > 1  # yet they are kept


def test_trap_the_caller_s_arrays_are_not_written_to(step: Function, model: bytes) -> None:
    example = step.example(4)
    before = {name: value.clone() for name, value in example.items()}

    run_onnx(model, example)

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

    for ours, theirs in zip(run_onnx(model, example), function(example).values(), strict=True):
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
    found = run_onnx(model, example)[0]
    np.testing.assert_array_equal(found, example["batch.x"].round().numpy().argmax(-1).reshape(found.shape))
    assert found.shape == function(example)["metric.place"].shape


@pytest.mark.parametrize("options", [{}, {"keepdim": True}, {"dim": 0}, {"dim": 1}])
def test_the_place_of_the_largest_along_any_axis(options: dict[str, int]) -> None:
    function = pointwise(lambda t: {"metric.place": t["batch.x"].argmax(**options)}, batch__x=(4, 600))  # type: ignore[arg-type]
    example = function.example(1)

    np.testing.assert_array_equal(
        run_onnx(to_onnx(capture(function)), example)[0], function(example)["metric.place"].numpy()
    )


def test_the_place_of_a_single_number() -> None:
    function = pointwise(lambda t: {"metric.place": t["batch.x"].argmax(0)}, batch__x=())

    assert run_onnx(to_onnx(capture(function)), function.example(1))[0].shape == ()


# -- cross entropy's gradient ------------------------------------------------------------------------------


ROWS, CLASSES, IGNORED = 6, 700, 3
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda x, y: F.cross_entropy(x, y, reduction="sum"),
    "ignoring one": lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED),
    "weighted": lambda x, y: F.cross_entropy(x, y, weight=torch.arange(CLASSES) / 7.0),
    "of sequences": lambda x, y: F.cross_entropy(x.unsqueeze(-1), y.unsqueeze(-1)),
}


VIEWED = "of sequences"
"""Its rows change their shape between the two, and it stays."""


def gradient_of(loss: Callable[[Tensor, Tensor], Tensor]) -> Function:
    def fn(t: Tensors) -> Tensors:
        x = t["batch.x"].detach().requires_grad_()
        value = loss(x, t["batch.y"])
        (grad,) = torch.autograd.grad(value, x)
        return {"metric.loss": value.detach(), "metric.grad": grad}

    ports = {"batch.x": TensorSpec((ROWS, CLASSES)), "batch.y": TensorSpec((ROWS,), torch.int64)}
    return Function("train", fn, ports, label_range=CLASSES)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_torch_s(name: str) -> None:
    function = gradient_of(LOSSES[name])
    example = function.example(2)
    example["batch.y"][0] = IGNORED
    model = to_onnx(capture(function))

    found = run_onnx(model, example)

    for mine, theirs in zip(found, function(example).values(), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-7)
    ops = op_types(model)
    assert ops.count("ScatterElements") == 1 and ("Sub" in ops) == (name == VIEWED)


def test_what_is_laid_out_for_something_else_too_stays() -> None:
    """The gradient at the logarithms is a result of its own."""

    def fn(t: Tensors) -> Tensors:
        x = t["batch.x"].detach().requires_grad_()
        logs = F.log_softmax(x, -1)
        inner, outer = torch.autograd.grad(F.nll_loss(logs, t["batch.y"]), [logs, x])
        return {"metric.inner": inner, "metric.outer": outer}

    ports = {"batch.x": TensorSpec((ROWS, CLASSES)), "batch.y": TensorSpec((ROWS,), torch.int64)}
    function = Function("train", fn, ports, label_range=CLASSES)
    example = function.example(1)
    model = to_onnx(capture(function))

    for mine, theirs in zip(run_onnx(model, example), function(example).values(), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-5, atol=1e-7)
    assert "Sub" in op_types(model)


# -- state that onnxruntime writes where it reads it -------------------------------------------------------


N = 64
W, X, B, LOSS = "state.w", "batch.0.x", "batch.0.b", "metric.loss"
SQUARE = {W: TensorSpec((N, N)), X: TensorSpec((N, N)), B: TensorSpec((N, N))}
ROW = SQUARE | {B: TensorSpec((N,))}
IMAGES = {W: TensorSpec((2, 4, 48, 48)), X: TensorSpec((4, 4, 3, 3)), B: TensorSpec((4,))}
BATCHES = {W: TensorSpec((4, 16, 16)), X: TensorSpec((4, 16, 16)), B: TensorSpec((1,))}

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]

# What onnxruntime makes one kernel of, which reads and writes in another order than entry by entry.
FUSED: dict[str, tuple[Formula, dict[str, TensorSpec]]] = {
    "product and bias": (lambda w, x, b: w @ x + b, ROW),
    "product and matrix": (lambda w, x, b: x @ w + b, SQUARE),
    "product and factor": (lambda w, x, b: (w @ x) * 0.9, SQUARE),
    "layer and tanh": (lambda w, x, b: torch.tanh(F.linear(w, x, b)), ROW),
    "layer and relu": (lambda w, x, b: torch.relu(F.linear(w, x, b)), ROW),
    "sum with its own product": (lambda w, x, b: w + w.T @ x, SQUARE),
    "square": (lambda w, x, b: w @ w + w, SQUARE),
    "batched product": (lambda w, x, b: torch.bmm(w.transpose(1, 2), x) * 0.5, BATCHES),
    "quick gelu": (lambda w, x, b: w * torch.sigmoid(1.702 * w), SQUARE),
    "convolution and relu": (lambda w, x, b: torch.relu(F.conv2d(w, x, b, padding=1)), IMAGES),
    "sum with its convolution": (lambda w, x, b: w + F.conv2d(w, x, b, padding=1), IMAGES),
}

# The gradient of ones that a loss begins with looks as if it needed the loss; in the file it does not.
IN_PLACE_LOSSES: dict[str, Formula] = {
    "product": lambda w, x, b: (x @ w).sum(),
    "weight decay": lambda w, x, b: ((x @ w - b) ** 2).mean() + 0.01 * (w * w).sum(),
    "lasso": lambda w, x, b: ((x @ w - b) ** 2).mean() + 0.01 * w.abs().sum(),
    "linear": lambda w, x, b: ((x @ w - b) ** 2).mean() + (w * x).sum(),
    "entropy": lambda w, x, b: F.cross_entropy(x @ w, torch.arange(N)) + 0.01 * (w**2).sum(),
}


def checked(function: Function) -> tuple[str, ...]:
    """Exported, run with its state written where it was read, and compared with torch; that state."""
    form = target_of("onnx")
    artifact = form.emit(form.capture(function))
    form.verify(function, artifact.model, 1, artifact.in_place)
    return artifact.in_place


def updated(formula: Formula, ports: dict[str, TensorSpec]) -> Function:
    return Function("f", lambda t: {W: formula(t[W], t[X], t[B])}, ports)


@pytest.mark.parametrize("name", FUSED)
def test_state_that_one_kernel_would_read_and_write_keeps_its_memory(name: str) -> None:
    function = updated(*FUSED[name])

    assert checked(function) == ()


@pytest.mark.parametrize("name", IN_PLACE_LOSSES)
def test_a_loss_of_rewritten_weights_is_right(name: str) -> None:
    def step(tensors: Tensors) -> Tensors:
        weights = tensors[W].detach().requires_grad_()
        loss = IN_PLACE_LOSSES[name](weights, tensors[X], tensors[B])
        [gradient] = torch.autograd.grad(loss, weights)
        return {W: tensors[W] - 0.1 * gradient, LOSS: loss.detach()}

    checked(Function("f", step, ROW))


def test_what_is_computed_entry_by_entry_is_written_in_place() -> None:
    assert checked(updated(lambda w, x, b: 0.9 * w + x @ x + b, ROW)) == (W,)
    assert checked(updated(lambda w, x, b: (w - 0.1 * x).clamp(-0.5, 0.5), ROW)) == (W,)


def test_state_of_another_form_has_memory_of_its_own() -> None:
    """Of as many bytes, but not what the old state's memory is bound as."""

    def step(t: Tensors) -> Tensors:
        return {"state.m": t["state.m"] * 0.9 + t[X].mean(0, keepdim=True), "state.n": t["state.n"] * 0.5}

    ports = {"state.m": TensorSpec((4,)), "state.n": TensorSpec((4,), torch.int32), X: TensorSpec((3, 4))}
    assert checked(Function("f", step, ports)) == ()


def test_export_refuses_state_that_is_written_too_early() -> None:
    """What a device would compute is what is compared with torch."""
    form, function = target_of("onnx"), updated(*FUSED["product and bias"])
    artifact = form.emit(form.capture(function))

    form.verify(function, artifact.model, 1)
    with refuses(ExportError, function="f", output="state.w", error=..., tolerance=...):
        form.verify(function, artifact.model, 1, (W,))


# -- few rows by a transposed weight are multiplied from the other side -----------------------------------


PRODUCTS = {
    "few rows": ((32, 1024), (2048, 1024), 2),
    "one row": ((1, 64), (256, 64), 2),
    "many rows": ((65, 64), (1024, 64), 1),
    "few columns": ((32, 64), (127, 64), 1),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_product_is_the_same(tmp_path: Path, name: str, bias: bool) -> None:
    """``onnxruntime`` takes the transposed weight as it is, so that no copy of it is made."""
    rows, weight, transposes = PRODUCTS[name]
    ports = {"batch__x": rows, "weights__w": weight} | ({"weights__b": weight[:1]} if bias else {})
    function = pointwise(
        lambda t: {"metric.y": F.linear(t["batch.x"], t["weights.w"], t.get("weights.b"))}, **ports
    )

    model = to_onnx(capture(function))

    assert op_types(model).count("Transpose") == transposes
    assert verify(function, model, 1).worst < 1e-5

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    kept = op_types((tmp_path / "optimized.onnx").read_bytes())
    assert kept.count("Transpose") == transposes - 1 and {"FusedMatMul", "Gemm"} & {*kept}

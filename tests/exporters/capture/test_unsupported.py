"""An op that ONNX cannot say is told by name, with the module and the line that call it, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.split import split
from edgefl_export.capture.locate import SourceLocation, locate
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.pairs import slow
from tests.support.errors import ExportError, refuses

HERE = Path(__file__)


@torch.library.custom_op("edgefl_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, grad: grad * 2)


class Layer(nn.Module):
    """A linear layer with a function of one's own behind it."""

    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.linear(x))  # forward of Layer


def step(module: nn.Module) -> Function:
    parameters = dict(module.named_parameters())
    ports = {f"state.{name}": TensorSpec.of(value) for name, value in parameters.items()}

    def fn(tensors: Tensors) -> Tensors:
        leaves = {name: tensors[f"state.{name}"].detach().requires_grad_() for name in parameters}
        loss = torch.func.functional_call(module, leaves, (tensors["batch.0.x"],)).square().mean()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        return {f"state.{name}": leaves[name].detach() - g for name, g in zip(leaves, grads, strict=True)}

    return Function("train", fn, ports | {"batch.0.x": TensorSpec((2, 4))})


def refusal(module: nn.Module) -> ExportError:
    with pytest.raises(ExportError) as caught:
        to_onnx(capture(step(module)))
    return caught.value


def line_of(text: str) -> str:
    """``file:line`` of the line of this file that ends with the comment ``# text``."""
    lines = HERE.read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, start=1) if line.endswith(f"# {text}")]
    return f"{HERE}:{number}"


def spectrum(x: Tensor) -> Tensor:
    return torch.linalg.svd(x)[1]  # forward


def stretched(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x[:, None], size=6, mode="nearest-exact")  # backward


def bessel(x: Tensor) -> Tensor:
    return torch.special.i0(x)  # decomposed


def middle(x: Tensor) -> Tensor:
    return torch.nanmedian(x, 1).values  # sorted


def custom(x: Tensor) -> Tensor:
    return doubled(x)  # custom


def multiplied(x: Tensor) -> Tensor:
    return torch.complex(x, x).prod(0).abs()  # complex


def halved(x: Tensor) -> Tensor:
    return (x.half() * 2).float()  # half


def brain(x: Tensor) -> Tensor:
    return (x.bfloat16() * 2).float()  # brain


def mixed(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.T).float()  # mixed


def medians(x: Tensor) -> Tensor:
    skipping = torch.nanmedian(x, 1).values
    return skipping + torch.median(x, 1).values  # plain


def test_complex_numbers_are_told_by_the_op_without_a_form() -> None:
    error = refusal(Layer(multiplied))

    assert error.details["op"] == "aten.prod.dim_int"
    assert "has no form for complex numbers" in error.message
    assert f"in module Layer, at {line_of('complex')}" in error.message


@pytest.mark.parametrize(
    ("fn", "dtype", "comment"),
    [(halved, "float16", "half"), (brain, "bfloat16", "brain"), (mixed, "bfloat16", "mixed")],
)
def test_narrow_floats_are_told_by_the_op_that_makes_them(fn: Callable, dtype: str, comment: str) -> None:
    error = refusal(Layer(fn))

    assert error.details["op"] == "aten._to_copy.default"
    assert f"makes a {dtype} tensor (in module Layer, at {line_of(comment)})" in error.message
    assert "Only float32 and float64" in error.message


def test_a_narrow_port_is_told_by_its_name() -> None:
    ports = {"state.w": TensorSpec((2,)), "batch.0.x": TensorSpec((2,), torch.float16)}
    function = Function("train", lambda t: {"state.w": t["state.w"] + t["batch.0.x"]}, ports)

    with refuses(ExportError, function="train", input="batch.0.x"):
        to_onnx(capture(function))


def test_float64_is_exported() -> None:
    function = Function(
        "f", lambda t: {"state.w": t["state.w"] * 2}, {"state.w": TensorSpec((2,), torch.float64)}
    )

    assert verify(function, to_onnx(capture(function)), 0).worst == 0.0


def test_an_op_is_not_taken_for_another_one_that_has_its_name_inside() -> None:
    place = locate(step(Layer(medians)), "aten.median.dim")

    assert (place.op, place.source) == ("aten.median.dim", line_of("plain"))


@pytest.mark.parametrize(
    ("op", "found"),
    [
        ("aten.rrelu_with_noise_functional.default", "aten.rrelu_with_noise.default"),
        ("aten.rrelu_with_noise_copy.default", "aten.rrelu_with_noise.default"),
    ],
)
def test_an_op_is_found_under_the_name_of_its_form_without_writes(op: str, found: str) -> None:
    place = locate(step(nn.Sequential(Layer(torch.tanh), nn.RReLU()).eval()), op)

    assert (place.op, place.module) == (found, "1 (RReLU)")


def test_random_draws_the_example_is_no_call_of_the_function() -> None:
    assert locate(step(Layer(torch.tanh)), "aten.randn.default") == SourceLocation()


def test_a_module_under_two_names_is_told_by_the_one_that_is_called() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = Layer(spectrum)
            self.enc = nn.Sequential(Layer(torch.tanh), self.unused)

        def forward(self, x: Tensor) -> Tensor:
            return self.enc(x)

    assert refusal(Twice()).details["module"] == "enc.1 (Layer)"


def test_a_module_of_a_list_is_told_with_the_name_of_the_list() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(torch.tanh), Layer(spectrum)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    assert refusal(nn.Sequential(Listed())).details["module"] == "0.layers.1 (Layer)"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fn", "op", "comment"),
    [
        (spectrum, "aten._linalg_svd.default", "forward"),
        slow(middle, "aten.nanmedian.dim", "sorted"),
        (custom, "edgefl_tests.doubled.default", "custom"),
    ],
)
def test_an_op_of_the_forward_pass_is_told_with_its_line(fn: Callable, op: str, comment: str) -> None:
    error = refusal(Layer(fn))

    assert error.details["op"] == op
    assert error.details["module"] == "Layer"
    assert error.details["source"] == line_of(comment)
    assert op in error.message and line_of(comment) in error.message
    assert "exporters/edgefl_export/decompositions" in error.message or "by its factors" in error.message


def test_an_op_of_the_gradient_is_told_with_the_forward_line() -> None:
    error = refusal(Layer(stretched))

    assert error.details["op"] == "aten._upsample_nearest_exact1d_backward.default"
    assert error.details["module"] == "Layer"
    assert error.details["source"] == line_of("backward")
    assert "in the gradient of what is called" in error.message


def test_an_op_of_a_decomposition_is_told_as_the_op_called() -> None:
    error = refusal(Layer(bessel))

    assert error.details["op"] == "aten.i0.default"
    assert error.details["source"] == line_of("decomposed")


@pytest.mark.parametrize("fn", [spectrum, slow(stretched)])
def test_the_path_of_a_nested_module_is_told(fn: Callable) -> None:
    inner = nn.Sequential(nn.ReLU(), Layer(fn))
    module = nn.Sequential(Layer(torch.tanh), inner)

    error = refusal(module)

    assert error.details["module"] == "1.1 (Layer)"
    assert "in module 1.1 (Layer)" in error.message


@pytest.mark.slow
def test_a_supported_module_beside_it_is_not_blamed() -> None:
    error = refusal(nn.Sequential(Layer(torch.relu), Layer(stretched)))

    assert error.details["module"] == "1 (Layer)"


class Blocks(nn.Module):
    """Cut automatically, its operations run in code that is generated from a graph."""

    def __init__(self, fn: Callable[[Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.ModuleList([Layer(torch.tanh), Layer(fn)])
        self.layer, self.head = layer or nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner[1](self.inner[0](self.first(x)) + 1)
        x = self.layer(x)  # layer
        return self.head(x + 1)


def cut(module: nn.Module, cuts: tuple[str, ...] | None = None) -> nn.Module:
    return split(module, cuts, sample=TensorSpec((4,)), classes=4).module


def spectra(x: Tensor) -> Tensor:
    return torch.linalg.svd(x.reshape(-1, 2, 2))[1].repeat(1, 2)


def resized(x: Tensor) -> Tensor:
    return nn.functional.interpolate(x[:, None], size=4, mode="nearest-exact").flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [spectra, resized])
def test_a_cut_model_is_told_by_the_line_of_its_forward(fn: Callable) -> None:
    units = cut(Blocks(fn), ("inner.1.linear",))
    error = refusal(units)

    assert any(isinstance(unit, fx.GraphModule) for unit in units)
    assert error.details["module"] == "inner.1 (Layer)"
    assert error.details["source"] == line_of("forward of Layer")


@pytest.mark.slow
def test_an_op_of_a_cut_model_is_told_with_the_models_class() -> None:
    class Between(Blocks):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.linalg.svd(self.first(x).reshape(-1, 2, 2))[1]  # between
            return self.head(x.repeat(1, 2))

    error = refusal(cut(Between(torch.tanh)))

    assert error.details["module"] == "Between"
    assert error.details["source"] == line_of("between")


@pytest.mark.slow
def test_an_op_inside_a_layer_is_told_by_the_line_of_the_call() -> None:
    resize = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Upsample(4, mode="nearest-exact"), nn.Flatten())
    error = refusal(cut(Blocks(torch.tanh, resize)))

    assert error.details["source"] == line_of("layer")

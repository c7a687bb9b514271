"""Gradients that are rewritten while they are torch's own ops: cheaper, and the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn import functional as F

from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.wire.bundle.formats import FormatName
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.rewrites import rewrite_gradients
from edgefl_export.capture.trace import capture, trace
from edgefl_export.compiler.compiler import target_of
from edgefl_export.decompositions import core_table
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import pointwise, step_of

_aten = torch.ops.aten
FORMATS: tuple[FormatName, ...] = ("onnx", "executorch")
IMAGES = (4, 8, 12, 12)


def gradients(net: nn.Module, shape: tuple[int, ...]) -> Function:
    """Of a weighted sum of what ``net`` gives, by its weights and by x."""
    weights = {f"state.weights.{name}": value.detach() for name, value in net.named_parameters()}

    def function(t: Tensors) -> Tensors:
        read = {name: t[name].requires_grad_() for name in (*weights, "batch.0.x")}
        own = {name.removeprefix("state.weights."): read[name] for name in weights}
        y = torch.func.functional_call(net, own, (read["batch.0.x"],))
        loss = (y * torch.cos(torch.arange(y.numel())).view(y.shape)).sum()
        made = torch.autograd.grad(loss, list(read.values()))
        return {f"metric.of.{name}": value for name, value in zip(read, made, strict=True)}

    inputs = {name: TensorSpec.of(value) for name, value in weights.items()}
    return Function("gradients", function, {**inputs, "batch.0.x": TensorSpec(shape)})


def rewritten(function: Function) -> fx.Graph:
    module = trace(function).module
    rewrite_gradients(module, core_table())
    return module.graph


def check(function: Function, example: Tensors) -> LoweredGraph:
    """Both formats compute what torch does."""
    expected = function({name: value.clone() for name, value in example.items()})
    for form in FORMATS:
        lowered = target_of(form).capture(function)
        found = lowered(example)
        for name, value in expected.items():
            scale = max(value.abs().max().item(), 1.0)  # of a bias before a norm it is zero
            assert (found[name] - value).abs().max().item() < 2e-5 * scale, (form, name)
    return lowered


def example_of(function: Function, net: nn.Module) -> dict[str, Tensor]:
    own = {f"state.weights.{name}": value.detach().clone() for name, value in net.named_parameters()}
    return {**function.example(0), **own}


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(torch.relu(self.conv(x)), 2)


def test_equal_entries_of_a_window_and_windows_of_zeros() -> None:
    torch.manual_seed(0)
    net = Pooled()
    function = gradients(net, IMAGES)
    example = example_of(function, net)
    example["batch.0.x"] = torch.zeros(IMAGES)
    example["batch.0.x"][:2] = 1.0
    example["state.weights.conv.bias"] = torch.tensor([0.5, -0.5, 0.0, -3.0])

    check(function, example)


class Normed(nn.Module):
    """A convolution and its norm; ``beside``: something else reads the convolution's result."""

    def __init__(self, conv: nn.Module, norm: nn.Module, *, beside: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.beside = conv, norm, beside

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y: Tensor = torch.relu(self.norm(x))
        return y + x if self.beside else y


def conv(out: int = 6, groups: int = 1, **options: int) -> nn.Conv2d:
    return nn.Conv2d(8, out, 3, padding=1, groups=groups, **options)  # type: ignore[arg-type]


def norm(channels: int, kind: type[nn.Module] = nn.BatchNorm2d, **options: bool) -> nn.Module:
    return kind(channels, track_running_stats=False, **options)


NORMED: dict[str, tuple[Callable[[], Normed], bool]] = {
    "training": (lambda: Normed(conv(), norm(6)), True),
    "with a stride": (lambda: Normed(conv(stride=2), norm(6)), True),
    "without weights": (lambda: Normed(conv(), norm(6, affine=False)), True),
    "frozen": (lambda: Normed(conv(), nn.BatchNorm2d(6).eval()), True),
    "grouped": (lambda: Normed(conv(4, 2), norm(4)), True),
    "depthwise": (lambda: Normed(conv(8, 8), norm(8)), True),
    "in one axis": (
        lambda: Normed(nn.Sequential(nn.Flatten(2), nn.Conv1d(8, 6, 3)), norm(6, nn.BatchNorm1d)),
        True,
    ),
    "read beside": (lambda: Normed(conv(), norm(6), beside=True), False),
    "transposed": (lambda: Normed(nn.ConvTranspose2d(8, 6, 3), norm(6)), False),
    "a kernel of many entries": (lambda: Normed(conv(64, stride=8), norm(64)), False),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", NORMED)
def test_a_convolution_takes_the_gain_of_its_norm(kind: str) -> None:
    build, folded = NORMED[kind]
    torch.manual_seed(0)
    net = build()
    for value in net.parameters():
        nn.init.normal_(value)
    if isinstance(net.norm, nn.BatchNorm2d) and net.norm.affine:
        with torch.no_grad():
            net.norm.weight[0] = 0.0
    function = gradients(net, IMAGES)

    own = [n for n in rewritten(function).nodes if n.target is torch.ops.edgefl.batch_norm_gradient.default]
    assert bool(own) == folded
    check(function, example_of(function, net))


def test_a_table_without_a_rule_for_it_keeps_the_gradient_of_torch() -> None:
    torch.manual_seed(0)
    net = NORMED["training"][0]()

    nodes = capture(gradients(net, IMAGES), {}).module.graph.nodes
    assert any(node.target is _aten.native_batch_norm_backward.default for node in nodes)


# -- A clamp's gradient asks the result in place of the input ----------------------------------------------


def compared(lowered: LoweredGraph) -> list[object]:
    """What the graph's comparisons with a bound read."""
    return [
        node.args[0].target
        for node in lowered.module.graph.nodes
        if node.target in (_aten.le.Scalar, _aten.ge.Scalar)
    ]


@pytest.mark.parametrize(
    "activation", [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(), nn.Hardtanh(-2.0, 0.5)]
)
def test_gradients_of_clamps_read_what_the_next_layer_reads(activation: nn.Module) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Flatten(), nn.Linear(64, 3))
    step = step_of(module, (3, 6, 6))
    lowered = capture(step)
    assert compared(lowered) == [_aten.hardtanh.default] * 2
    verify(step, to_onnx(lowered), seed=0)


def test_masks_are_the_same_at_and_around_the_bounds() -> None:
    def gradient(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"].detach().requires_grad_()
        [found] = torch.autograd.grad(F.relu6(x).sum(), [x])
        return {"record.g": found}

    x = torch.tensor([-1.0, -0.0, 0.0, 1e-45, 3.0, 6.0 - 5e-7, 6.0, 6.0 + 5e-7, torch.inf, -torch.inf])
    lowered = capture(pointwise(gradient, batch__0__x=(10,)))
    assert compared(lowered) == [_aten.hardtanh.default] * 2
    tensors = {"batch.0.x": x}
    torch.testing.assert_close(lowered(tensors), gradient(tensors), rtol=0, atol=0)


def test_comparisons_of_whole_numbers_stay() -> None:
    """A clamp of whole numbers rounds its bounds."""

    def masked(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"].to(torch.int64)
        return {"record.y": F.hardtanh(x, -2, 2).float(), "record.m": ((x <= -2) | (x >= 2)).float()}

    lowered = capture(pointwise(masked, batch__0__x=(10,)))
    assert len(compared(lowered)) == 2 and _aten.hardtanh.default not in compared(lowered)


def test_comparisons_with_other_numbers_stay() -> None:
    def masked(tensors: Tensors) -> Tensors:
        x = tensors["batch.0.x"]
        return {"record.y": F.relu6(x), "record.m": ((x <= 1.0) | (x >= 5.0)).float()}

    lowered = capture(pointwise(masked, batch__0__x=(10,)))
    assert len(compared(lowered)) == 2 and _aten.hardtanh.default not in compared(lowered)

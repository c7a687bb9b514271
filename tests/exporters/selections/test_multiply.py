"""Selections become products where that changes nothing, and stay selections where a gradient may be infinite."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as kinds
from edgefl_export.executorch.check.programs import load, verify
from edgefl_export.executorch.program.write import to_executorch
from edgefl_export.executorch.rules import table
from edgefl_export.executorch.target import ExecuTorchTarget, XnnpackMaskPass
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from tests.exporters.examples import small_net, step_of
from tests.pairs import by_default, slow

_aten = torch.ops.aten
SELECTIONS = frozenset(
    {_aten.where.self, *(getattr(_aten, name).Scalar for name in ("gt", "ge", "lt", "le")), _aten.gt.Tensor}
)

SHAPE = (2, 3, 8, 8)
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "root behind a ReLU": lambda x: x.relu().sqrt(),
    "root behind a ReLU and a factor": lambda x: (x.relu() * 3.0).sqrt(),
    "power behind a ReLU": lambda x: x.relu() ** 0.3,
    "root behind a sum of ReLUs": lambda x: (x.relu().view(-1, 4) @ x.new_ones(4, 2)).sqrt(),
    "root behind ReLU6": lambda x: F.hardtanh(x * 4, 0.0, 6.0).sqrt(),
    "logarithm behind a ReLU": lambda x: (x.relu() * x.gt(0) + x.le(0)).log(),
    "root behind a maximum of ReLUs": lambda x: F.max_pool2d(x.relu(), 2).sqrt(),
    "root behind a maximum": lambda x: F.max_pool2d(x * x, 2).sqrt(),
    "length behind a ReLU": lambda x: F.normalize(x.relu().view(6, -1), dim=1),
    "guarded logarithm": lambda x: torch.where(x > 0, x.log(), torch.zeros_like(x)),
    "root behind a dropout": lambda x: torch.where(x > 0.1, x * 2, torch.zeros_like(x)).abs().sqrt(),
}


def gradient(fn: Callable[[Tensor], Tensor]) -> Function:
    """The gradient of a sum over fn(x), and its value."""

    def step(t: Tensors) -> Tensors:
        leaf = t["batch.0.x"].detach().requires_grad_()
        loss = (fn(leaf) * 1.5).sum()
        return {"metric.loss": loss.detach(), "metric.grad": torch.autograd.grad(loss, leaf)[0]}

    return Function("example", step, {"batch.0.x": TensorSpec(SHAPE)})


SHARPEST = (
    "root behind a ReLU",
    "root behind a sum of ReLUs",
    "root behind ReLU6",
    "root behind a maximum",
    "length behind a ReLU",
    "guarded logarithm",
    "root behind a dropout",
)


Run = Callable[[Mapping[str, np.ndarray]], Sequence[np.ndarray]]


def _on_onnx(function: Function) -> Run:
    model = to_onnx(OnnxTarget().capture(function))
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return lambda arrays: session.run(None, dict(arrays))


def _on_executorch(function: Function) -> Run:
    return load(function, to_executorch(ExecuTorchTarget().capture(function)).model)


ENGINES = {"onnx": _on_onnx, "executorch": _on_executorch}


@pytest.mark.sample(6)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", by_default(CASES, SHARPEST))
def test_an_entry_selected_away_has_no_gradient(name: str, engine: str) -> None:
    function = gradient(CASES[name])
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    x[0, 0, 0, :4] = torch.tensor([0.0, -0.0, -1.0, 1e-30])
    expected = function({"batch.0.x": x})["metric.grad"]

    found = ENGINES[engine](function)({"batch.0.x": x.numpy()})[1]

    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "net",
    [
        slow(small_net(), id="small"),
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        ),
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.ReLU(), nn.BatchNorm1d(6).eval(), nn.Linear(6, 3)),
    ],
    ids=[None, "norm and maximum", "groups", "layer norm", "frozen norm"],
)
def test_no_gradient_of_an_ordinary_network_needs_a_selection(net: nn.Module) -> None:
    function = step_of(net, (3, 8, 8))
    lowered = ExecuTorchTarget().capture(function)
    on_onnx = OnnxTarget().capture(function)

    losses = [node for node in lowered.module.graph.nodes if node.target is _aten._log_softmax.default]
    images = [node for node in lowered.module.graph.nodes if node.target in SELECTIONS and _is_large(node)]
    selected = on_onnx.module.graph.find_nodes(op="call_function", target=_aten.where.self)
    assert losses and not images and not any(map(_is_large, selected))
    assert verify(function, to_executorch(lowered).model, 1).worst < 1e-4


def _is_large(node: fx.Node) -> bool:
    """What runs over the labels of a batch is not."""
    return node.meta["val"].numel() > 16


def _traced(function: object, *example: Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake", decomposition_table=table())(*example)  # type: ignore[arg-type]
    output = module.graph.output_node()
    output.args = ((output.args[0],),)
    XnnpackMaskPass()(module)
    module.recompile()
    return module


def _count(module: fx.GraphModule) -> int:
    return sum(node.target in SELECTIONS for node in module.graph.nodes)


def test_dropout_is_a_product_with_a_mask() -> None:
    def drop(x: Tensor, uniform: Tensor) -> Tensor:
        kept = torch.where(uniform >= 0.25, x / 0.75, torch.zeros_like(x))
        return kept + torch.where(uniform < 0.5, torch.zeros_like(x), x * 3.0)

    x, uniform = torch.randn(64, 64), torch.rand(64, 64)
    uniform[0, :3] = torch.tensor([0.25, 0.5, 0.0])
    after = _traced(drop, x, uniform)

    assert _count(after) == 0
    torch.testing.assert_close(after(x, uniform)[0], drop(x, uniform))


def test_both_parts_of_a_selection_add_up_to_the_whole() -> None:
    def parts(x: Tensor, y: Tensor) -> Tensor:
        zero = torch.zeros(())
        return torch.where(x > y, x, zero) * 2 + torch.where(x > y, zero, x) * 3

    x, y = torch.randn(8, 8), torch.randn(8, 8)
    after = _traced(parts, x, y)

    assert _count(after) == 0
    torch.testing.assert_close(after(x, y)[0], parts(x, y))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.where(x > 0, x.log(), torch.zeros_like(x)),
        lambda x: torch.where(x > 0, x / x, torch.zeros_like(x)),
        lambda x: torch.where(x > 0, x.rsqrt() * 2 + 1, torch.zeros_like(x)),
        lambda x: torch.where(x > 0, x.exp() - x.abs().log(), torch.zeros_like(x)),
        lambda x: torch.where(x > 0, (x - 1.0) ** -2, torch.zeros_like(x)),
        lambda x: torch.where(x > 0, x.masked_fill(x < 1, -float("inf")), torch.zeros_like(x)),
        lambda x: torch.where(x > 0, torch.special.i0(x), torch.zeros_like(x)),
    ],
)
def test_a_selection_that_keeps_out_what_may_not_be_finite_stays_one(fn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0.0
    after = _traced(fn, x)

    assert _count(after) >= 2
    torch.testing.assert_close(after(x)[0], fn(x))


ZERO = torch.zeros(())
GUARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "a quotient by the largest": lambda x: torch.where(x.abs().amax() > 9, x / (x * 0).abs().amax(), ZERO),
    "a quotient by a sum": lambda x: torch.where((x * 0).sum() > 0, x / (x * 0).sum(), ZERO),
    "a quotient by a length": lambda x: torch.where((x * 0).norm() > 0, x / (x * 0).norm(), ZERO),
    "the logarithm of a sum": lambda x: torch.where((x * 0).sum() > 0, (x * 0).sum().log(), ZERO) + x,
    "a mean over what is chosen": lambda x: torch.where(x > 9, x / (x > 9).float().sum(), ZERO),
    "a logarithm near one": lambda x: torch.where(x > -1, (x + 1.0).log(), ZERO),
    "a logarithm near zero": lambda x: torch.where(x > 0, (x + 1e-6).log(), ZERO),
    "a softmax behind a mask": lambda x: torch.where(
        x > 0, x.masked_fill(x <= 0, -math.inf).log_softmax(-1), ZERO
    ),
    "a softmax of rows that are masked throughout": lambda x: torch.where(
        x > 9, x.masked_fill(x <= 9, -math.inf).softmax(-1), ZERO
    ),
    "its logarithm": lambda x: torch.where(x > 9, x.masked_fill(x <= 9, -math.inf).log_softmax(-1), ZERO),
    "zeros of a larger shape": lambda x: torch.where(x[0] > 0, x[1], torch.zeros(4, 6)),
    "an exponential that is too large": lambda x: x.relu() + torch.where(x > 0, ZERO, (x * 200).exp() - 1),
    "a sigmoid that is zero": lambda x: torch.where(x > 0, (x * 200).sigmoid().log(), ZERO),
    "what is no number": lambda x: torch.where(x.log() > 0, x, ZERO),
    "minus infinity": lambda x: torch.where(x.abs().log() > -math.inf, x, ZERO),
    "infinity": lambda x: torch.where(1 / x.abs() < math.inf, x, ZERO),
}


def _run(fn: Callable[[Tensor], Tensor], x: Tensor, engine: str) -> Tensor:
    """fn(x) as an artifact."""
    ports = {"batch.0.x": TensorSpec(tuple(x.shape))}
    function = Function("example", lambda t: {"metric.y": fn(t["batch.0.x"])}, ports)
    return torch.from_numpy(ENGINES[engine](function)({"batch.0.x": x.numpy()})[0])


@pytest.mark.sample(12)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", GUARDS)
def test_what_a_selection_guards_against_does_not_come_through(name: str, engine: str) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    x[0, 0], x[1, 0], x[2], x[:, 1] = 0.0, 3.0, x[2].abs() + 0.1, 1.5
    expected = GUARDS[name](x)

    assert expected.isfinite().all()
    torch.testing.assert_close(_run(GUARDS[name], x, engine), expected)


def test_a_logarithm_near_zero_of_a_weight_is_guarded_too() -> None:
    """A weight is no variance: it may be negative."""
    ports = {"state.weights.w": TensorSpec((4, 6))}

    def fn(t: Tensors) -> Tensors:
        w = t["state.weights.w"]
        return {"metric.y": torch.where(w > 0, (w + 1e-6).log(), ZERO)}

    function = Function("example", fn, ports)
    w = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    found = load(function, to_executorch(ExecuTorchTarget().capture(function)).model)(
        {"state.weights.w": w.numpy()}
    )

    torch.testing.assert_close(torch.from_numpy(found[0]), fn({"state.weights.w": w})["metric.y"])


@pytest.mark.parametrize("engine", ENGINES)
def test_a_selection_of_what_is_finite_drops_what_is_not(engine: str) -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1.0, -3e38, 0.0]])

    found = _run(lambda x: torch.where(x.abs() <= torch.finfo(torch.float32).max, x, 0.0), x, engine)

    assert found.tolist() == [[0.0, 0.0, 0.0, 1.0, x[0, 4].item(), 0.0]]


@pytest.mark.parametrize("name", [slow("fedbat"), "per_fedavg"])
def test_no_gradient_of_an_own_step_needs_a_selection(name: str) -> None:
    net = build_model("mlp", classes=3, seed=1, size=6, hidden=(7,))
    algorithm = algorithms.build(name, Objective.of(kinds.build(net, "output_side", cut=0)), batch=5, steps=2)
    steps = [f for part in algorithm.exchanges for f in part.functions if f.name in ("binarize", "train")]

    graphs = [ExecuTorchTarget().capture(function).module.graph for function in steps]

    assert graphs
    for graph in graphs:
        assert not [
            node for node in graph.find_nodes(op="call_function", target=_aten.where.self) if _masks(node)
        ]


def _masks(node: fx.Node) -> bool:
    """A selection of an activation's gradient: as many rows as the batch, a column for each neuron."""
    return tuple(node.meta["val"].shape) == (5, 7)


def test_a_mean_over_counting_labels_leaves_no_selection() -> None:
    def step(t: Tensors) -> Tensors:
        leaf = t["batch.0.x"].detach().requires_grad_()
        loss = F.cross_entropy(leaf.relu() @ t["weights.w"], t["batch.0.y"], ignore_index=1)
        return {"metric.grad": torch.autograd.grad(loss, leaf)[0]}

    labels = TensorSpec((4,), torch.int64)
    ports = {"batch.0.x": TensorSpec((4, 8)), "weights.w": TensorSpec((8, 3)), "batch.0.y": labels}
    lowered = ExecuTorchTarget().capture(Function("example", step, ports, label_range=3))

    masked = lowered.module.graph.find_nodes(op="call_function", target=_aten.where.self)
    assert not [node for node in masked if tuple(node.meta["val"].shape) == (4, 8)]

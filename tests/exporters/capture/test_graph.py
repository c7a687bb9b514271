"""Graphs are those of make_fx: the same nodes by the same names, with results of the same shapes."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from edgefl.codecs import catalog as codecs
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors
from edgefl.models.zoo.basic import bilstm, mlp
from edgefl.submodels import catalog as submodels
from edgefl_export.capture import trace
from edgefl_export.capture.graph import Table, graph_of
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.algorithm import coded_algorithm
from edgefl_export.decompositions import core_table
from edgefl_export.executorch.rules import table as executorch_table
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import op_types, pointwise, run_onnx, small_net, step_of
from tests.pairs import slow

CONSTANT = torch.tensor([1.0, -2.0, 3.0])


def algorithm_step(codec: str, kind: str, **options: Any) -> Function:
    submodel = submodels.build(mlp(size=4, hidden=[5, 4], classes=3), kind, **options)
    training = {"batch": 4, "steps": 2, "momentum": 0.9} if codec == "dense" else {"batch": 4, "steps": 2}
    return coded_algorithm(submodel, "sgd", training, codecs.build(codec)).phases[-1].function


def recurrent_step() -> Function:
    submodel = submodels.build(bilstm(), "output_side")
    return (
        coded_algorithm(submodel, "sgd", {"batch": 2, "steps": 1}, codecs.build("dense")).phases[0].function
    )


def attention() -> Function:
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return step_of(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)), (3, 8))


def results_of_all_sorts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Constants, several results, writes in place, and a number out of a tensor that is always the same."""
    x = tensors["state.a"]
    first, second = x.split([1, 2])
    values, places = x.topk(2)
    scale = torch.tensor(2.5)
    moved = x.clone()
    moved[1:] += second * CONSTANT[:2] * float(scale)
    return {"state.a": moved + CONSTANT, "metric.b": values.sum() + first.sum() + places.sum() + scale}


CASES: dict[str, Callable[[], Function]] = {
    "batch norm": lambda: step_of(small_net(), (3, 6, 6)),
    "max pooling": lambda: step_of(
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 3)), (1, 8, 8)
    ),
    "attention": attention,
    "lstm": recurrent_step,
    "momentum": lambda: algorithm_step("dense", "output_side", cut=1),
    "masks": lambda: algorithm_step("dense", "importance", gamma=0.5),
    "trained codec": lambda: algorithm_step("fedbat", "width", gamma=0.5),
    "constants": lambda: pointwise(results_of_all_sorts, state__a=(3,)),
}


def looks(value: object) -> str:
    """Of several results each has a node of its own, where it is used."""
    if not isinstance(value, Tensor):
        return ""
    return str((tuple(value.shape), value.stride(), value.storage_offset(), value.dtype))


def nodes(module: fx.GraphModule) -> list[tuple[str, str, str, str]]:
    return [
        (
            node.name,
            node.op,
            str(node.target),
            looks(node.meta.get("val")) if node.op == "call_function" else "",
        )
        for node in module.graph.nodes
    ]


def by_make_fx(
    fn: Callable[..., Any], arguments: Sequence[Tensor], table: Table, *, fake: bool
) -> fx.GraphModule:
    """What :func:`graph_of` gives, by torch's own means."""
    options = {"tracing_mode": "fake", "_allow_non_fake_inputs": True} if fake else {"tracing_mode": "real"}
    return make_fx(fn, dict(table), **options)(*arguments)  # type: ignore[arg-type]


# make_fx alone takes seconds for these, for the recurrent step most of a minute.
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "case",
    [slow(case) if case in {"lstm", "attention", "batch norm", "trained codec"} else case for case in CASES],
)
def test_what_is_captured_is_what_make_fx_traces(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = CASES[case]()
    made = [capture(function, table) for table in (core_table(), executorch_table())]
    monkeypatch.setattr(trace, "graph_of", by_make_fx)
    known = [capture(function, table) for table in (core_table(), executorch_table())]
    for ours, theirs in zip(made, known, strict=True):
        assert ours.module.code == theirs.module.code and nodes(ours.module) == nodes(theirs.module)
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
        for node in ours.module.graph.find_nodes(op="get_attr"):
            assert torch.equal(getattr(ours.module, node.target), getattr(theirs.module, node.target))


def test_a_number_may_come_out_of_a_constant_and_out_of_nothing_else() -> None:
    doubled = graph_of(lambda x: (x * float(torch.tensor(2.0)),), (torch.ones(2),), {}, fake=False)
    assert torch.equal(doubled(torch.ones(2))[0], torch.full((2,), 2.0))
    for taken in (
        lambda x: x.sum().item(),
        lambda x: float(x[0] + torch.tensor(1.0)),
        lambda x: bool(x[0] > 0),
    ):
        with pytest.raises(RuntimeError, match="out of a tracing tensor"):
            graph_of(lambda x, taken=taken: (x * taken(x),), (torch.ones(2),), {}, fake=False)


def test_what_a_function_computed_on_the_way_is_let_go_of() -> None:
    seen: list[Any] = []

    def forgetful(x: Tensor) -> tuple[Tensor]:
        between = x * 2
        seen.append(weakref.ref(between))
        result = between + 1
        del between
        assert seen[0]() is None, "the graph keeps shapes, not values"
        return (result,)

    graph_of(forgetful, (torch.ones(3),), {}, fake=False)


def test_writes_to_nothing_and_gradients_of_nothing_leave_the_rest() -> None:
    """Of a window as large as the picture, shifted by 0: ``mask[-2:-0] = 1``."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        mask = x.new_zeros(2, 4)
        for start, stop in ((0, -2), (-2, 0), (0, None)):
            mask[start:stop, 1:] = 3.0
            mask[1:][start:stop, -1:0] = 5.0
        return mask.view(2, 2, 2) + x.sum(), torch.func.grad(lambda x: (x * x[:0].sum() + x).sum())(x)

    x = torch.tensor([1.0, 2.0])
    for table in ({}, core_table(), executorch_table()):
        first = graph_of(fn, (x,), {}, fake=False)
        second = graph_of(torch.func.functionalize(first), (x,), table, fake=True)
        torch.testing.assert_close(second(x), fn(x))


def test_one_value_behind_a_mask_is_chosen_and_not_scattered() -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        whole, columns, rows = x.clone(), x.clone(), x.clone()
        whole[x.abs() > 1] = 0
        columns[:, x[0] > 0] = -1e9
        rows[x[:, 0] < 0] = 2.5
        return whole, columns, rows

    x = torch.tensor([[0.5, -2.0, 3.0], [-1.0, 1.5, -0.25]])
    for table in (core_table(), executorch_table()):
        first = graph_of(fn, (x,), {}, fake=False)
        second = graph_of(torch.func.functionalize(first), (x,), table, fake=True)
        torch.testing.assert_close(second(x), fn(x))
        assert not any("index_put" in str(node.target) for node in second.graph.nodes)


def test_a_result_without_values_has_the_current_type() -> None:
    whole = torch.ones(3, dtype=torch.int64)

    def halves(x: Tensor) -> tuple[Tensor]:
        return (x / 2,)

    seen = []
    for dtype in (torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        seen.append(graph_of(halves, (whole,), {}, fake=True).graph.output_node().args[0][0])
    torch.set_default_dtype(torch.float32)

    assert [node.meta["val"].dtype for node in seen] == [torch.float64, torch.float32]


def test_a_result_without_values_is_as_large_as_a_processor_makes_it() -> None:
    """In inference batch norm saves no statistics on a processor; a device of no values says that it does."""

    def normed(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten._native_batch_norm_legit_no_training(
            x, weight, weight, weight, weight, 0.1, 1e-5
        )

    x, weight = torch.ones(2, 3, 4, 4), torch.ones(3)
    seen = graph_of(normed, (x, weight), {}, fake=True).graph.output_node().args[0]
    assert [node.meta["val"].shape for node in seen] == [result.shape for result in normed(x, weight)]


# -- batch norm as one ONNX node ---------------------------------------------------------------------------


STATISTICS = torch.ops.aten._native_batch_norm_legit.no_stats


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)


def outputs(function: Callable[[Tensors], Tensors], example: Tensors) -> dict[str, np.ndarray]:
    """What onnxruntime gives for ``example``."""
    made = pointwise(function, **{name.replace(".", "__"): tuple(t.shape) for name, t in example.items()})
    model = to_onnx(capture(made))
    found = zip(names(model), run_onnx(model, example), strict=True)
    return {name.removesuffix(".next"): value for name, value in found}


def names(model: bytes) -> list[str]:
    return [value.name for value in onnx.load_from_string(model).graph.output]


def test_two_norms_of_one_tensor_are_each_right() -> None:
    def fn(t: Tensors) -> Tensors:
        x = t["batch.0.x"]
        return {
            "record.a": norm(x, t["state.w"], t["state.b"]),
            "record.b": norm(x, t["state.v"], t["state.b"]),
            "record.c": norm(x, None, None),
            "record.d": norm(x, t["state.w"], None, eps=0.1),
            "record.x": x * 2,
        }

    function = pointwise(fn, batch__0__x=(4, 3, 5, 5), state__w=(3,), state__v=(3,), state__b=(3,))
    verify(function, to_onnx(capture(function)), 0)


def test_their_saved_statistics_are_each_right() -> None:
    def fn(t: Tensors) -> Tensors:
        found = {}
        for name in ("w", "v"):
            y, mean, inverse = STATISTICS(t["batch.0.x"], t[f"state.{name}"], t["state.b"], True, 0.1, 1e-5)
            found |= {f"record.y{name}": y, f"record.m{name}": mean, f"record.i{name}": inverse}
        return found

    function = pointwise(fn, batch__0__x=(4, 3, 5, 5), state__w=(3,), state__v=(3,), state__b=(3,))
    verify(function, to_onnx(capture(function)), 0)


class Twice(nn.Module):
    """One norm on different inputs, and two norms of one input; their statistics move each time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.shared, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        z = self.shared(y) + self.other(y)
        return self.head(self.shared(z).relu().mean((2, 3)))


@functools.cache
def twice() -> tuple[Function, bytes]:
    function = step_of(Twice(), (3, 6, 6))
    return function, to_onnx(capture(function))


def test_one_module_applied_twice_trains_as_in_torch() -> None:
    report = verify(*twice(), 0)

    assert report.worst <= 1e-4 and not report.rounding


def test_a_second_run_gives_the_first_result_again() -> None:
    function, model = twice()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    example = function.example(1)
    feeds = {port.name: example[port.name].numpy().copy() for port in session.get_inputs()}

    first = session.run(None, feeds)
    again = session.run(None, feeds)

    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, two)
    for name, array in feeds.items():
        np.testing.assert_array_equal(array, example[name].numpy())


@pytest.mark.parametrize("mean", [0.0, 1e3, -1e3])
def test_a_mean_far_from_zero_costs_no_digits_beyond_those_of_the_input(mean: float) -> None:
    """E[x^2] - E[x]^2 would lose all of them: float32 has seven, and the variance is a millionth of the square."""
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(0)) + mean
    weight = torch.tensor([1.0, -2.0, 0.5])

    found = outputs(
        lambda t: {"record.y": norm(t["batch.0.x"], t["state.w"], None)}, {"batch.0.x": x, "state.w": weight}
    )["record.y"]

    exact = norm(x.double(), weight.double(), None).numpy()
    np.testing.assert_allclose(found, exact, atol=2e-3 if mean else 1e-5)


@pytest.mark.parametrize("weight", [0.0, -0.0, float("inf")])
def test_a_channel_with_an_odd_weight_leaves_the_others_alone(weight: float) -> None:
    x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    w = torch.tensor([1.0, weight, 2.0])

    found = outputs(
        lambda t: {"record.y": norm(t["batch.0.x"], t["state.w"], None)}, {"batch.0.x": x, "state.w": w}
    )["record.y"]

    np.testing.assert_allclose(found, norm(x, w, None).numpy(), rtol=1e-4, atol=1e-5)


def test_statistics_are_no_array_that_another_node_reads() -> None:
    function = pointwise(
        lambda t: {"record.a": norm(t["batch.0.x"], t["state.w"], None)},
        batch__0__x=(4, 3, 5, 5),
        state__w=(3,),
    )
    model = to_onnx(capture(function))
    graph = onnx.load_from_string(model).graph

    assert "BatchNormalization" in op_types(model)
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            statistics = set(node.input[3:])
            assert not statistics & {value.name for value in (*graph.input, *graph.initializer)}

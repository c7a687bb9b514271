"""Graphs are those of make_fx: the same nodes by the same names, with results of the same shapes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from edgefl.codecs import catalog as codecs
from edgefl.contract.algorithm import Function
from edgefl.models.zoo.basic import bilstm, mlp
from edgefl.submodels import catalog as submodels
from edgefl_export.capture import trace
from edgefl_export.capture.graph import Table, graph_of
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.algorithm import coded_algorithm
from edgefl_export.decompositions import core_table
from edgefl_export.executorch.rules import table as executorch_table
from tests.exporters.examples import pointwise, small_net, step_of
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

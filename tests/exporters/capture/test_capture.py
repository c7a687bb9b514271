"""The traced graph: pure, only core ops, only what outputs need."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import edgefl
import edgefl_export.capture.locate
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.locate import is_compiler
from edgefl_export.capture.rewrites import merge_equal
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.onnx.target import OnnxTarget
from tests.exporters.engines import ENGINES, function_of, on_engine
from tests.exporters.examples import pointwise, small_net, step_of
from tests.parity.ops.case import Case
from tests.support.errors import ExportError, refuses


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

    with refuses(ExportError, function="example", shape=(3, 3)):
        capture(pointwise(lambda t: {"metric.y": layer(t["batch.0.x"]).sum().detach()}, batch__0__x=(2, 3)))


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

    with refuses(ExportError, function="example", ports=["x"]):
        capture(function)


# -- merge of equal nodes ----------------------------------------------------------------------------------


_aten = torch.ops.aten


def test_a_value_that_is_computed_twice_is_computed_once() -> None:
    def fn(tensors: Tensors) -> Tensors:
        w, x = tensors["state.w"], tensors["batch.0.x"]
        loss = (torch.where(w.abs() > 0.5, w, 0.0) * x).sum()
        return {"metric.loss": loss, "state.w": w - loss * w.abs()}

    wide = TensorSpec((8, 8))
    found = OnnxTarget().capture(Function("f", fn, {"state.w": wide, "batch.0.x": wide}))

    assert Counter(node.target for node in found.module.graph.nodes)[_aten.abs.default] == 1


def test_calls_that_differ_stay() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    calls = [
        *(graph.call_function(_aten.add.Scalar, (x, value)) for value in (0.0, -0.0, 1, 1.0, True)),
        *(graph.call_function(_aten.rand.default, ([2],)) for _ in range(2)),
        *(graph.call_function(_aten.add_.Scalar, (x, 1)) for _ in range(2)),
    ]
    graph.output(tuple(calls))

    merge_equal(fx.GraphModule({}, graph))

    assert [node for node in graph.nodes if node.op == "call_function"] == calls


def test_what_is_equal_behind_equal_nodes_is_merged_too() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(_aten.abs.default, (x,)) for _ in range(2))
    sums = [graph.call_function(_aten.sum.dim_IntList, (each, [0, 1])) for each in (first, second)]
    graph.output(tuple(sums))

    merge_equal(fx.GraphModule({}, graph))

    assert [node.target for node in graph.nodes][1:-1] == [_aten.abs.default, _aten.sum.dim_IntList]


# -- tensors outside of a model's state --------------------------------------------------------------------


class Projected(nn.Module):
    """A fixed random projection of more entries than a constant of an algorithm may have."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        table = torch.randn(8, 640, generator=torch.Generator().manual_seed(0))
        self.tables = (table,)
        if not hidden:
            self.register_buffer("table", table, persistent=False)
        self.hidden, self.head = hidden, nn.Linear(640, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = self.tables[0] if self.hidden else self.get_buffer("table")
        out: Tensor = self.head(torch.tanh(x @ table))
        return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("hidden", [False, True])
def test_a_large_tensor_outside_of_the_state_is_a_constant(hidden: bool) -> None:
    module = Projected(hidden=hidden)
    bundle = edgefl.compile(
        edgefl.Model(module, sample=(8,), classes=3),
        training=edgefl.Training(algorithm=edgefl.algorithms.SGD(batch=2, steps=1)),
    )

    assert bundle.verify().ok


# -- what torch.onnx would export wrong --------------------------------------------------------------------


def transposed(x: Tensor) -> Tensor:
    return x.t().as_strided((3, 2), (2, 1), 1)


def before_the_view(x: Tensor) -> Tensor:
    return (x * 2)[1:].as_strided((3, 2), (3, 1), 1)


def behind_the_view(x: Tensor) -> Tensor:
    return (x * 2)[:1].as_strided((3, 2), (3, 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("view", [transposed, before_the_view, behind_the_view])
def test_strides_over_memory_that_the_tensor_does_not_show_are_refused(view: Callable) -> None:
    with pytest.raises(ExportError, match=r"op aten\.as_strided\.default .* has no ONNX form") as caught:
        to_onnx(capture(Case(view, (4, 5)).step()))

    assert caught.value.details["op"] == "aten.as_strided.default"


# -- ops that no engine can run are refused by name, with the user's line and with what to write instead ---


SQUARE = torch.tensor([[2.0, 1, 0], [0.3, -3, 1], [1, 0.2, 1]])


def sampled(x: Tensor) -> Tensor:
    image = x.reshape(1, 1, 3, 3)
    grid = (x.reshape(-1)[:8].reshape(1, 2, 2, 2) * 0.2).tanh()
    return F.grid_sample(image, grid, align_corners=False)


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "grid_sampler_2d_backward": (sampled, "gather"),
    "lgamma": (lambda x: torch.lgamma(x.abs() + 1), "Stirling"),
    "_linalg_slogdet": (lambda x: torch.linalg.slogdet(x @ x.T)[1], "diagonal"),
    "_linalg_det": (torch.linalg.det, "diagonal"),
    "linalg_matrix_exp": (torch.linalg.matrix_exp, "series"),
    "linalg_inv_ex": (torch.linalg.inv, "factors"),
    "special_log_ndtr": (torch.special.log_ndtr, "erfc"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("op", REFUSED)
def test_a_refusal_names_the_op_the_line_and_what_to_write(op: str, engine: str) -> None:
    fn, remedy = REFUSED[op]

    with pytest.raises(ExportError) as refused:
        on_engine(engine, function_of(fn, (SQUARE,), gradients=True), (SQUARE,))

    text = str(refused.value)
    assert op in text and remedy in text
    assert "test_capture.py" in text or "engines.py" in text


def test_the_gradient_of_an_embedding_with_max_norm_on_executorch() -> None:
    places = torch.tensor([0, 2])

    def limited(x: Tensor) -> Tensor:
        return F.embedding(places, x.clone(), max_norm=1.0)

    with pytest.raises(ExportError, match="divide the rows"):
        on_engine("executorch", function_of(limited, (SQUARE,)), (SQUARE,))


# -- whose line an op is told with -------------------------------------------------------------------------


def test_torch_behind_a_link_is_the_compiler_s(tmp_path: Path) -> None:
    link = tmp_path / "site-packages"
    link.symlink_to(Path(torch.__file__).parents[1])

    assert is_compiler(link / "torch" / "functional.py")
    assert is_compiler(Path(edgefl_export.capture.locate.__file__))
    assert not is_compiler(Path(__file__))

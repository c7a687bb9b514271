"""A step within a memory budget: the same numbers, less memory, and second computations that runtimes keep."""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ConfigError, ExportError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.graph import LoweredGraph
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.memory.budget import within_onnx
from edgefl_export.memory.predict import predicted_peak
from edgefl_export.memory.recompute import WORTH, Budget, beside_tensors, lean, peak_bytes
from edgefl_export.memory.usage import around_products, timeline
from edgefl_export.onnx.model import to_onnx
from edgefl_export.operators import AFTER
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import pointwise, run_onnx
from tests.pairs import by_default

# Large enough that activations, not weights, are most of the peak.
MODELS: dict[str, tuple[dict[str, object], int]] = {
    "resnet8": ({"size": 32}, 64),
    "vit": ({"size": 16, "width": 24, "depth": 2, "rate": 0.1}, 16),
    "lstm_lm": ({"length": 8, "vocabulary": 50, "features": 16, "hidden": 32}, 32),
}
# What the tight step keeps of the tensors' peak; the convolutional net has to repeat convolutions for it.
SHARE = {"resnet8": 0.6, "vit": 0.9, "lstm_lm": 0.8}
on_each_model = pytest.mark.parametrize("model", by_default(MODELS, ["lstm_lm"]))


@functools.cache
def captured_step(model: str) -> LoweredGraph:
    options, batch = MODELS[model]
    return capture(step_of_model(model, options, batch))


def step_of_model(model: str, options: dict[str, object], batch: int) -> Function:
    objective = Objective.of(OutputSide(build_model(model, **options), 0))
    return algorithms.build("sgd", objective, batch=batch).phases[0].function


@functools.cache
def tight_step(model: str) -> LoweredGraph:
    """The step with less room for its tensors than it takes without a budget."""
    lowered = captured_step(model)
    return within(lowered, room(lowered, SHARE[model]))


@functools.cache
def tight_bytes(model: str) -> bytes:
    return to_onnx(tight_step(model))


def within(lowered: LoweredGraph, budget: int) -> LoweredGraph:
    """The step in the form that the budget allows, which is to be one graph."""
    (form,), _ = within_onnx(lowered, Budget(budget))
    return form


def room(lowered: LoweredGraph, share: float) -> int:
    """A budget that leaves ``share`` of the tensors' peak."""
    return beside_tensors(lowered) + int(share * timeline(lowered.module).peak)


def optimized(model: bytes, folder: Path) -> onnx.ModelProto:
    """What onnxruntime runs, nodes in the order in which it runs them."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return onnx.load(options.optimized_model_filepath)


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def convolutions(model: onnx.ModelProto) -> int:
    """Also transposed ones, and those that onnxruntime has fused with what follows."""
    return sum("Conv" in node.op_type for node in model.graph.node)


def targets(lowered: LoweredGraph) -> Counter[object]:
    return Counter(node.target for node in lowered.module.graph.nodes)


# -- the numbers ---------------------------------------------------------------------------------------------


@on_each_model
def test_a_step_with_a_budget_equals_torch(model: str) -> None:
    report = verify(captured_step(model).function, tight_bytes(model), 0)

    assert report.worst <= 1e-4 and not report.rounding


@pytest.mark.slow
@on_each_model
def test_noise_is_read_again_and_not_drawn_again(model: str) -> None:
    lowered, tight = captured_step(model), tight_step(model)

    assert tight.inputs == lowered.inputs and tight.outputs == lowered.outputs
    if model != "resnet8":
        assert any(name.startswith("noise.") for name in tight.inputs)


# -- the estimate --------------------------------------------------------------------------------------------


@on_each_model
def test_the_estimate_falls_below_the_budget(model: str) -> None:
    lowered = captured_step(model)

    assert peak_bytes(tight_step(model)) <= room(lowered, SHARE[model]) < peak_bytes(lowered)


@pytest.mark.slow
def test_less_room_costs_more_computation() -> None:
    lowered = captured_step("resnet8")
    kept = torch.ops.aten.convolution.default

    counts = [targets(within(lowered, room(lowered, share)))[kept] for share in (1.0, 0.8, 0.6)]

    assert counts == sorted(counts) and counts[0] < counts[-1]


@pytest.mark.slow
def test_a_budget_that_is_met_already_changes_nothing() -> None:
    lowered = captured_step("resnet8")

    for budget in (peak_bytes(lowered), 10**15):
        assert within(lowered, budget).module is lowered.module
    assert to_onnx(within(lowered, 10**15)) == to_onnx(lowered)


@pytest.mark.slow
def test_recomputation_leaves_the_captured_graph_alone() -> None:
    lowered = captured_step("resnet8")
    before = str(lowered.module.graph)

    within(lowered, room(lowered, SHARE["resnet8"]))

    assert str(lowered.module.graph) == before


@pytest.mark.slow
def test_equal_steps_with_equal_budgets_give_equal_bytes() -> None:
    lowered = captured_step("lstm_lm")

    assert to_onnx(within(lowered, room(lowered, SHARE["lstm_lm"]))) == tight_bytes("lstm_lm")


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_is_told_with_what_would_do() -> None:
    lowered = captured_step("resnet8")
    budget = predicted_peak(lowered) // 4

    with pytest.raises(ExportError) as caught:
        within(lowered, budget)

    smallest = caught.value.details["smallest"]
    assert caught.value.details["budget"] == budget < smallest < peak_bytes(lowered)
    assert f"budget of {budget / 2**20:.1f} MiB" in caught.value.message
    told = math.ceil(10 * smallest / 2**20) / 10  # what is told is enough
    assert f"needs {told:.1f} MiB" in caught.value.message
    within(lowered, smallest)


# -- what runtimes make of it ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_second_convolutions_are_in_the_file_and_in_what_onnxruntime_runs(tmp_path: Path) -> None:
    lowered, tight = captured_step("resnet8"), tight_step("resnet8")
    again = targets(tight)[torch.ops.aten.convolution.default]
    once = targets(lowered)[torch.ops.aten.convolution.default]

    found = onnx.load_from_string(tight_bytes("resnet8"))
    run = optimized(tight_bytes("resnet8"), tmp_path)

    assert again > once + 3
    assert ops(found)["Conv"] - ops(onnx.load_from_string(to_onnx(lowered)))["Conv"] == again - once
    assert convolutions(run) == convolutions(found)


@pytest.mark.slow
@on_each_model
def test_onnxruntime_waits_wherever_the_file_does(model: str, tmp_path: Path) -> None:
    """Each IsNaN turns a trigger into a wait; fused away, the second computation would run with the first."""
    found = ops(onnx.load_from_string(tight_bytes(model)))
    run = ops(optimized(tight_bytes(model), tmp_path))

    assert found["IsNaN"] == run["IsNaN"] > 0
    assert found["Scan"] == run["Scan"] and found["Softmax"] == run["Softmax"]


@pytest.mark.slow
def test_onnxruntime_computes_again_in_the_backward_pass(tmp_path: Path) -> None:
    """Its order is its own: what counts is how many convolutions come behind the loss."""

    def behind(model: bytes) -> int:
        nodes = list(optimized(model, tmp_path).graph.node)
        loss = next(i for i, node in enumerate(nodes) if node.op_type in ("Log", "LogSoftmax"))
        return sum("Conv" in node.op_type for node in nodes[loss:])

    assert behind(tight_bytes("resnet8")) > behind(to_onnx(captured_step("resnet8"))) + 3


VIEWS = {
    "plain": lambda x: x,
    "view": lambda x: x.view(4, 6),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "view of a view": lambda x: x.unsqueeze(0).view(12, 2),
    "squeeze": lambda x: x.view(1, 24).squeeze(0),
    "permute": lambda x: x.permute(2, 0, 1),
    "slice": lambda x: x[:, 1:],
    "copy": lambda x: x.clone().view(4, 6),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("inside", [True, False], ids=["before", "behind"])
def test_a_value_waits_through_views_before_and_behind(name: str, inside: bool, tmp_path: Path) -> None:
    view = VIEWS[name]

    def fn(t: Tensors) -> Tensors:
        x, trigger = t["state.x"], t["state.x"].sum().exp()
        late = AFTER(view(x), trigger) if inside else view(AFTER(x, trigger))
        return {"record.first": view(x).exp(), "metric.sum": trigger, "record.again": late.exp()}

    function = pointwise(fn, state__x=(2, 3, 4))
    model = to_onnx(capture(function))

    verify(function, model, 0)
    for found in (onnx.load_from_string(model), optimized(model, tmp_path)):
        assert ops(found)["IsNaN"] == 1 and ops(found)["Exp"] == 3
        assert depends(found, "record.again", "IsNaN")


def depends(model: onnx.ModelProto, output: str, op: str) -> bool:
    """Whether a node of type ``op`` is among what ``output`` is computed from."""
    producer = {name: node for node in model.graph.node for name in node.output}
    stack, seen = [output], set()
    while stack:
        name = stack.pop()
        if name in producer and name not in seen:
            seen.add(name)
            stack += producer[name].input
    return any(producer[name].op_type == op for name in seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("trigger", [0.0, -3.5, math.nan, math.inf, -math.inf])
def test_after_is_its_first_argument_whatever_the_trigger(trigger: float, dtype: torch.dtype) -> None:
    function = Function(
        "wait",
        lambda t: {"record.x": AFTER(t["state.x"], t["state.t"]) * 1},
        {"state.x": TensorSpec((2, 3), dtype), "state.t": TensorSpec((2, 2), dtype)},
    )
    x = np.array([[math.nan, 1, -0.0], [math.inf, -math.inf, 4]], str(dtype).removeprefix("torch."))

    arrays = {"state.x": x, "state.t": np.full((2, 2), trigger, x.dtype)}
    (found,) = run_onnx(to_onnx(capture(function)), arrays)

    np.testing.assert_array_equal(found, x)


# -- budgets as people write them --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("48MiB", 48 * 2**20),
        ("100 MB", 100e6),
        ("1.5 gib", 1.5 * 2**30),
        ("2kb", 2000),
        ("2KiB", 2048),
        (" 7 B ", 7),
    ],
)
def test_a_size_is_read(text: str, count: float) -> None:
    assert Budget.parse(text) == Budget(count)


def test_a_share_is_one_of_what_the_tensors_take_without() -> None:
    lowered = captured_step("lstm_lm")

    assert Budget.parse("50%").of(lowered) == beside_tensors(lowered) + timeline(lowered.module).peak // 2
    assert Budget.parse("100%").of(lowered) == peak_bytes(lowered)
    assert Budget.parse("48MiB").of(lowered) == 48 * 2**20


@pytest.mark.parametrize(
    "text",
    ["", "much", "-1", "0", "64", "0%", "0.0 MiB", "5 TiB", "MiB", "1e6", "5%%", "1 2 MB", "nan", "1,5GB"],
)
def test_what_is_no_budget_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 48MiB or a share such as 50%") as caught:
        Budget.parse(text)

    assert caught.value.details["found"] == text


@given(st.integers(1, 10**6), st.sampled_from(["B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]))
def test_the_unit_multiplies(number: int, unit: str) -> None:
    factor = 1 if unit == "B" else (1024 if "i" in unit else 1000) ** (1 + "KMG".index(unit[0]))

    assert Budget.parse(f"{number} {unit}").of(captured_step("lstm_lm")) == number * factor


# -- a real process ------------------------------------------------------------------------------------------------


def test_what_a_device_is_told_to_have_ready_fits_the_budget_too() -> None:
    """onnxruntime computes arithmetic beside what it reads: the estimate of a budget alone would not count that."""

    def chain(tensors: Tensors) -> Tensors:
        return {"metric.loss": (((tensors["batch.0.x"] + 1.0) * 2.0).exp() - 3.0).sum()}

    lowered = capture(Function("f", chain, {"batch.0.x": TensorSpec((8192, 4096))}))
    form = target_of("onnx")
    needed = form.emit(lowered).planned_bytes
    assert peak_bytes(lowered) < 300 * 2**20 < needed

    with pytest.raises(ExportError, match=r"does not fit a memory budget of 300\.0 MiB"):
        form.emit(lowered, Budget(300 * 2**20))
    artifact = form.emit(lowered, Budget(needed))
    assert artifact.planned_bytes <= artifact.memory_budget


@pytest.mark.slow
def test_what_costs_next_to_nothing_is_computed_again_without_a_budget() -> None:
    lowered = capture(step_of_model("resnet20", {}, 16))
    leaner = lean(lowered)

    assert predicted_peak(leaner) < WORTH * predicted_peak(lowered)
    products = Counter(
        node.target for node in lowered.module.graph.nodes if "convolution" in str(node.target)
    )
    again = Counter(node.target for node in leaner.module.graph.nodes if "convolution" in str(node.target))
    assert again == products, "no convolution is computed twice"
    assert verify(lowered.function, to_onnx(leaner), seed=0).worst < 1e-4


def test_a_masked_weight_does_not_go_around_a_product() -> None:
    """No product leads to it, so it is computed again from the weight alone."""

    def fn(tensors: Tensors) -> Tensors:
        w, x = tensors["state.w"], tensors["batch.0.x"]
        h = x @ (w * w.abs())
        return {"metric.loss": (h + torch.sin(h) @ w).sum()}

    square = TensorSpec((8, 8))
    nodes = list(capture(Function("f", fn, {"state.w": square, "batch.0.x": square})).module.graph.nodes)
    product = torch.ops.aten.mm.default

    found = around_products(nodes, lambda node: node, lambda node: node.target is product)

    assert {node.target for node in found} == {product}


@pytest.mark.parametrize("model", ["mlp", "resnet8"], ids=["saves little", "would take its time"])
def test_a_graph_that_would_gain_little_stays_as_it_is(model: str) -> None:
    lowered = capture(step_of_model(model, {}, 16))

    assert lean(lowered) is lowered

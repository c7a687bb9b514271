"""Each node of a training graph gets its phase, its module and its multiplications, in either form of the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from edgefl import algorithms
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import BundleError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog
from edgefl.wire.blobs import decompress
from edgefl.wire.bundle import sources
from edgefl.wire.bundle.sources import OpOrigin, OpOriginRow, OriginTable
from edgefl_export.artifact import Artifact
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.compiler import target_of
from edgefl_export.memory.recompute import plans
from edgefl_export.onnx.model import to_onnx
from edgefl_export.sources import GraphNodes, OpNode, graph_nodes, onnx_nodes, packed_sources
from tests.exporters.examples import BATCH, step_of

WIDTH, HIDDEN, CLASSES = 6, 5, 3


def as_algorithm(step: Function) -> Function:
    """``step`` with the weights' ports named as algorithms name them: ``state.weights.0.weight``."""
    names = {name: name.replace("state.", "state.weights.", 1) for name in step.inputs}

    def fn(t: Tensors) -> Tensors:
        out = step.fn({name: t[renamed] for name, renamed in names.items()})
        return {names.get(name, name): value for name, value in out.items()}

    ports = {names[name]: spec for name, spec in step.inputs.items()}
    return Function("train", fn, ports, label_range=CLASSES)


def written(format: str) -> Artifact:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    made = target_of(format)
    return made.emit(made.capture(as_algorithm(step_of(net, (WIDTH,)))))


@pytest.fixture(scope="module", params=["onnx", "captured", "executorch"])
def nodes(request: pytest.FixtureRequest) -> dict[str, OpOrigin]:
    if request.param == "executorch":
        return dict(written("executorch").nodes)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    lowered = capture(as_algorithm(step_of(net, (WIDTH,))))
    model = to_onnx(lowered) if request.param == "onnx" else b""
    if request.param == "onnx":
        return onnx_nodes(lowered, model)
    return graph_nodes(lowered, lowered.module.graph)


def macs(nodes: dict[str, OpOrigin], phase: str, module: str) -> int:
    return sum(node.macs for node in nodes.values() if (node.phase, node.module) == (phase, module))


def test_forward_products_belong_to_the_layer_of_their_weight(nodes: dict[str, OpOrigin]) -> None:
    assert macs(nodes, "forward", "0") == BATCH * WIDTH * HIDDEN
    assert macs(nodes, "forward", "2") == BATCH * HIDDEN * CLASSES


def test_the_last_layer_multiplies_twice_backwards(nodes: dict[str, OpOrigin]) -> None:
    assert macs(nodes, "backward", "2") == 2 * BATCH * HIDDEN * CLASSES
    assert macs(nodes, "backward", "0") == BATCH * WIDTH * HIDDEN
    assert sum(node.macs for node in nodes.values() if node.phase == "update") == 0


def test_the_update_is_the_step_from_gradients_to_weights(nodes: dict[str, OpOrigin]) -> None:
    update = [(node.op.lower(), node.module) for node in nodes.values() if node.phase == "update"]
    for module in ("0", "2"):
        assert sorted(op for op, owner in update if owner == module) == ["mul", "mul", "sub", "sub"]


def test_every_phase_has_nodes_and_every_node_moves_bytes(nodes: dict[str, OpOrigin]) -> None:
    assert {node.phase for node in nodes.values()} == set(sources.PHASES)
    assert sum(node.nbytes for node in nodes.values()) > 4 * (WIDTH * HIDDEN + HIDDEN * CLASSES)


def test_nodes_of_an_algorithm_stand_with_its_instructions_in_their_order() -> None:
    firsts = [int(name.partition(":")[0]) for name in written("executorch").nodes]
    assert firsts == sorted(firsts) and firsts[0] == 0
    assert len(set(firsts)) < len(firsts)  # some run as one


def test_a_graph_without_a_loss_is_forward() -> None:
    found = GraphNodes(
        (OpNode("a", "Identity", ("weights.head.w",), ("v",)),), {"state.weights.head.w": "v"}
    ).attributed()
    assert (found["a"].phase, found["a"].module) == ("forward", "head")


def test_moving_statistics_are_part_of_the_update() -> None:
    ops = (
        OpNode("mean", "ReduceMean", ("batch.0.x",), ("m",)),
        OpNode("loss", "Mul", ("m", "state.weights.bn.weight"), ("l",), elementwise=True),
        OpNode("moved", "Add", ("m", "state.weights.bn.running_mean"), ("r",), elementwise=True),
    )
    found = GraphNodes(ops, {"metric.loss": "l", "state.weights.bn.running_mean": "r"}).attributed()
    assert {name: node.phase for name, node in found.items()} == {
        "mean": "forward",
        "loss": "forward",
        "moved": "update",
    }
    assert found["moved"].module == "bn"


def test_a_conversion_of_the_captured_graph_moves_data_and_keeps_its_name() -> None:
    def fn(t: Tensors) -> Tensors:
        return {"metric.loss": (t["state.weights.0.weight"].to(torch.float64) * 2).to(torch.float32).sum()}

    ports = {"state.weights.0.weight": TensorSpec((3,))}
    lowered = capture(Function("half", fn, ports))
    found = graph_nodes(lowered, lowered.module.graph)

    conversions = [node for node in found.values() if "to" in node.op.split("_")]
    assert {(node.op, node.module) for node in conversions} == {("_to_copy", "0")}


@pytest.mark.parametrize("format", ["onnx", "captured"])
@pytest.mark.parametrize("kept", ["state.momentum.{}", "state.adam.m.{}", "state.own.m/{}"])
def test_what_is_kept_beside_a_weight_belongs_to_its_layer(format: str, kept: str) -> None:
    """Also where the step reads what it has just made of it, and for a scalar, which belongs to no layer."""
    weight, moment, scalar = "state.weights.stem.fc.weight", kept.format("stem.fc.weight"), "state.adam.mass"

    def fn(t: Tensors) -> Tensors:
        x, w = t["batch.0.x"], t[weight]
        m = t[moment] * 0.9 + x.T @ (x @ w)
        mass = t[scalar] * 0.5
        return {weight: w - m * mass, moment: m, scalar: mass, "metric.loss": (x @ w).sum()}

    specs = {
        "batch.0.x": TensorSpec((2, 3)),
        weight: TensorSpec((3, 3)),
        moment: TensorSpec((3, 3)),
        scalar: TensorSpec(()),
    }
    lowered = capture(Function("train", fn, specs))
    found = (
        onnx_nodes(lowered, to_onnx(lowered))
        if format == "onnx"
        else graph_nodes(lowered, lowered.module.graph)
    )

    assert {node.module for node in found.values()} <= {"", "stem.fc"}
    products = [node for node in found.values() if node.op.lower() in ("mul", "sub") and node.module]
    assert len(products) >= 2


def test_a_memory_that_is_sent_belongs_to_its_layer() -> None:
    ops = (OpNode("a", "Div", ("state.full.layer1.conv.weight", "state.seen"), ("out",)),)

    found = GraphNodes(ops, {"update.c/layer1.conv.weight": "out"}).attributed()

    assert found["a"].module == "layer1.conv"


@pytest.mark.slow
def test_recomputed_products_count_their_multiplications() -> None:
    """Their weights wait for a gradient, and then tell no shape."""
    spec = build_model("resnet8")
    lowered = capture(
        algorithms.build("sgd", Objective.of(catalog.build(spec, "output_side", cut=0)), batch=8)
        .phases[0]
        .function
    )
    plain = onnx_nodes(lowered, to_onnx(lowered))
    lean = replace(lowered, module=list(plans(lowered))[-1].module)
    again = onnx_nodes(lean, to_onnx(lean))

    products = [node for node in again.values() if node.op in ("MatMul", "Gemm", "Conv", "ConvTranspose")]
    assert all(node.macs > 0 for node in products)
    assert sum(node.macs for node in again.values()) > 1.2 * sum(node.macs for node in plain.values())


def test_sources_survive_their_blob(nodes: dict[str, OpOrigin]) -> None:
    ref, data = packed_sources({"train": nodes, "again": nodes}, 1 << 20)
    found = sources.decode(decompress(ref, data, 1 << 20))
    assert found.nodes("train") == nodes
    assert found.nodes("unknown") == {}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        sources.encode(OriginTable(modules=(), graphs={"g": (OpOriginRow("a", "Add", 0, 0, 0, 0),)})),
        sources.encode(OriginTable(modules=("m",), graphs={"g": (OpOriginRow("a", "Add", 3, 0, 0, 0),)})),
    ],
)
def test_malformed_sources_are_a_bundle_error(data: bytes) -> None:
    with pytest.raises(BundleError, match="export the bundle again"):
        sources.decode(data)

"""The bundle of a tier: complete, checked, and shared between tiers where functions are equal."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import msgspec
import onnx
import pytest
import torch
from torch import nn

from edgefl.algorithms.baselines.sgd import sgd
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.wire.bundle.archive import BundleArchive, read_bundle, write_bundle
from edgefl.wire.bundle.formats import FORMATS
from edgefl.wire.bundle.manifest import BlobRef, DataSpec, Graph, decode_manifest, encode_manifest
from edgefl.wire.bundle.variants import decompress
from edgefl_export.compiler.compiler import check_installed, target_of
from edgefl_export.compiler.manifest import check_wiring, ports
from edgefl_export.compiler.request import ChunkForward
from edgefl_export.compiler.verify import verify_bundle
from edgefl_export.onnx import target
from edgefl_export.onnx.blocked.images import write_blocked
from edgefl_export.verify.graphs import verify
from tests.exporters.examples import BATCH, step_of
from tests.pairs import by_default
from tests.support.bundles import build_bundle, request_of
from tests.support.errors import BundleError, ConfigError, ExportError, refuses

DATA = DataSpec(shape=(3, 6, 6), dtype="float32", classes=3)


def algorithm_of(module: nn.Module, shape: tuple[int, ...]) -> Algorithm:
    step = step_of(module, shape)
    state = {name.removeprefix("state."): spec for name, spec in step.inputs.items() if name[:5] == "state"}

    def finish(t: Tensors) -> Tensors:
        return prefixed("update", select(t, "state"))

    def evaluate(t: Tensors) -> Tensors:
        return {
            "metric.count": torch.ones_like(t["batch.0.y"], dtype=torch.float32).sum() + t["batch.0.x"].sum()
        }

    return Algorithm(
        name="test",
        start=Function(
            "start", lambda t: prefixed("state", select(t, "weights")), prefixed("weights", state)
        ),
        phases=(Phase("train", step, 5),),
        finish=Function("finish", finish, prefixed("state", state)),
        evaluate=Function(
            "evaluate", evaluate, {name: step.inputs[name] for name in ("batch.0.x", "batch.0.y")}
        ),
        hyper={"lr": 0.1},
    )


def forward_of(module: nn.Module, shape: tuple[int, ...]) -> Function:
    weights = {f"weights.{name}": TensorSpec.of(value) for name, value in module.named_parameters()}

    def fn(t: Tensors) -> Tensors:
        with torch.no_grad():
            return {"record.x": torch.func.functional_call(module, select(t, "weights"), (t["batch.0.x"],))}

    return Function("forward", fn, weights | {"batch.0.x": TensorSpec((BATCH, *shape))})


def build(algorithm: Algorithm, prefix: tuple[ChunkForward, ...], tier: str = "weak") -> BundleArchive:
    return build_bundle(algorithm, ("head",), prefix=prefix, model="net", tier=tier, data=DATA)


@pytest.fixture(scope="module")
def suffix() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


@pytest.fixture(scope="module")
def conv() -> ChunkForward:
    return ChunkForward(("conv",), forward_of(nn.Conv2d(3, 4, 3), (3, 6, 6)))


@pytest.fixture(scope="module")
def built(suffix: nn.Sequential, conv: ChunkForward) -> tuple[BundleArchive, list[str]]:
    """A bundle with a prefix, and what was said while it was built."""
    said: list[str] = []
    algorithm = algorithm_of(suffix, (4, 4, 4))
    return build_bundle(
        algorithm, ("head",), prefix=(conv,), model="net", tier="weak", data=DATA, on_progress=said.append
    ), said


def test_bundle_has_every_graph_and_survives_a_file(
    built: tuple[BundleArchive, list[str]], tmp_path: Path
) -> None:
    bundle, _ = built
    write_bundle(bundle, tmp_path / "weak.efl")

    manifest = read_bundle(tmp_path / "weak.efl").manifest

    assert manifest == bundle.manifest
    assert {graph.name for graph in manifest.graphs} == {"forward.1", "start", "train", "finish", "evaluate"}
    assert [(chunk.units, manifest.graph(chunk.graph).outputs[0].name) for chunk in manifest.prefix] == [
        (("conv",), "record.x")
    ]
    assert manifest.batch == BATCH and manifest.steps == 5
    assert {port.role for port in manifest.graph("train").inputs} == {"state", "batch", "hyper"}


def test_equal_functions_of_tiers_share_blobs(
    suffix: nn.Sequential, built: tuple[BundleArchive, list[str]]
) -> None:
    weak, _ = built
    other = build(algorithm_of(suffix, (4, 4, 4)), (), tier="other")

    assert {graph.blob.sha256 for graph in other.manifest.graphs} < set(weak.blobs)
    assert other.encoded != weak.encoded


def test_progress_names_each_graph(built: tuple[BundleArchive, list[str]]) -> None:
    _, said = built

    assert len(said) == 5 and "train" in " ".join(said)


def test_a_state_nobody_leaves_is_told(suffix: nn.Sequential) -> None:
    algorithm = algorithm_of(suffix, (4, 4, 4))
    start = Function("start", lambda t: {"state.other": t["weights.x"] + 1}, {"weights.x": TensorSpec((1,))})

    with pytest.raises(ExportError, match=r"'train' reads 'state\.1\.weight' .* nothing of that name"):
        build(replace(algorithm, start=start), ())


def test_a_hyper_parameter_without_default_is_told(suffix: nn.Sequential) -> None:
    with refuses(ExportError, algorithm="test", hyper=["lr"]):
        build(replace(algorithm_of(suffix, (4, 4, 4)), hyper={}), ())


def test_a_prefix_cut_elsewhere_is_told(suffix: nn.Sequential) -> None:
    wrong = ChunkForward(("conv",), forward_of(nn.Conv2d(3, 4, 5), (3, 6, 6)))

    with pytest.raises(
        ExportError, match=r"records float32\[4, 4, 2, 2\], 'train' reads float32\[4, 4, 4, 4\]"
    ):
        build(algorithm_of(suffix, (4, 4, 4)), (wrong,))


def test_two_functions_of_one_name_are_told(suffix: nn.Sequential) -> None:
    algorithm = algorithm_of(suffix, (4, 4, 4))

    with refuses(ExportError, algorithm="test", function="start"):
        build(replace(algorithm, finish=replace(algorithm.finish, name="start")), ())


# -- both formats of a bundle's graphs ---------------------------------------------------------------------


both = pytest.mark.parametrize("name", FORMATS)
NET = nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


@pytest.fixture(scope="module")
def bundles() -> dict[str, BundleArchive]:
    """One algorithm's bundle in each format."""
    algorithm = algorithm_of(NET, (4, 4, 4))
    return {
        name: build_bundle(algorithm, ("head",), model="net", tier="weak", data=DATA, format=name)
        for name in FORMATS
    }


@pytest.fixture(scope="module")
def step() -> Function:
    torch.manual_seed(0)
    return step_of(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 2, 2))


def graph_of(name: str, function: Function) -> tuple[Graph, bytes]:
    form = target_of(name)
    lowered = form.capture(function)
    artifact = form.emit(lowered)
    listed = Graph(
        name=function.name,
        format=form.name,
        blob=BlobRef(sha256="", size=0, chunk=1),
        inputs=ports(lowered.inputs),
        outputs=ports(lowered.outputs),
    )
    return listed, artifact.model


@pytest.mark.slow
@both
def test_a_function_is_written_alike_twice_and_agrees_with_torch(name: str, step: Function) -> None:
    form = target_of(name)
    artifact = form.emit(form.capture(step))

    assert form.emit(form.capture(step)) == artifact
    assert artifact.planned_bytes > 0
    assert form.verify(step, artifact.model, seed=3).worst <= 1e-4


@both
def test_a_graph_of_another_function_is_found_out(name: str, step: Function) -> None:
    def twice(t: Tensors) -> Tensors:
        return {key: value * (2 if key == "metric.loss" else 1) for key, value in step.fn(t).items()}

    wrong = Function(step.name, twice, step.inputs)
    form = target_of(name)

    with pytest.raises(ExportError, match=r"'metric\.loss' of function"):
        form.verify(step, form.emit(form.capture(wrong)).model, seed=3)


@pytest.mark.slow
@both
def test_a_graph_agrees_with_its_ports_and_with_no_others(name: str, step: Function) -> None:
    form = target_of(name)
    graph, model = graph_of(name, step)
    fewer = msgspec.structs.replace(graph, inputs=graph.inputs[1:])

    assert form.port_mismatch(graph, model) == ""
    assert graph.inputs[0].name in form.port_mismatch(fewer, model)
    assert "export" in form.port_mismatch(graph, b"no model at all")


@pytest.mark.slow
def test_a_port_of_another_shape_in_an_algorithm_is_found_out(step: Function) -> None:
    graph, model = graph_of("executorch", step)
    first = msgspec.structs.replace(graph.inputs[0], shape=(7, 7))
    wrong = msgspec.structs.replace(graph, inputs=(first, *graph.inputs[1:]))

    assert f"{first.name!r} is float32[7, 7] in the manifest" in target_of("executorch").port_mismatch(
        wrong, model
    )


@pytest.mark.parametrize("name", [b"batch.0.x", b"metric.loss"])
def test_an_algorithm_whose_names_are_no_text_is_found_out(name: bytes, step: Function) -> None:
    graph, model = graph_of("executorch", step)

    assert "export it again" in target_of("executorch").port_mismatch(
        graph, model.replace(name, b"\xff" * len(name))
    )


def test_bundles_of_both_formats_say_the_same_of_their_ports(bundles: dict[str, BundleArchive]) -> None:
    found = {
        name: [(graph.name, graph.inputs, graph.outputs) for graph in made.manifest.graphs]
        for name, made in bundles.items()
    }

    assert found["onnx"] == found["executorch"]
    assert {name: made.manifest.format for name, made in bundles.items()} == {name: name for name in FORMATS}
    assert not set(bundles["onnx"].blobs) & set(bundles["executorch"].blobs)


@both
def test_a_bundle_knows_what_its_step_needs(bundles: dict[str, BundleArchive], name: str) -> None:
    made = bundles[name]

    assert made.manifest.graph("train").planned_bytes > 0
    assert decode_manifest(made.encoded) == made.manifest


@pytest.mark.parametrize("name", by_default(FORMATS, ["onnx"]))
def test_a_bundle_is_verified_in_its_own_runtime(bundles: dict[str, BundleArchive], name: str) -> None:
    check = verify_bundle(
        bundles[name], request_of(algorithm_of(NET, (4, 4, 4)), ("head",), data=DATA), seed=5
    )

    assert check.ok
    assert [each.graph for each in check.graphs] == ["start", "train", "finish", "evaluate"]


@both
def test_graphs_of_another_format_are_found_out(bundles: dict[str, BundleArchive], name: str) -> None:
    other = bundles["onnx" if name == "executorch" else "executorch"]
    graphs = tuple(msgspec.structs.replace(graph, format=name) for graph in other.manifest.graphs)
    wrong = BundleArchive(msgspec.structs.replace(other.manifest, graphs=graphs), other.blobs)

    check = verify_bundle(wrong, request_of(algorithm_of(NET, (4, 4, 4)), ("head",), data=DATA))

    assert not check.ok and all(each.problem for each in check.graphs)


@pytest.mark.parametrize("port", ["state.0.weight", "metric.loss", "hyper.lr"])
def test_only_unchanged_state_may_be_written_in_place(bundles: dict[str, BundleArchive], port: str) -> None:
    manifest = bundles["onnx"].manifest
    read = {each.name for each in manifest.graph("train").inputs_of("state")}
    port = sorted(read)[0] if port.startswith("state") else port
    graphs = tuple(
        msgspec.structs.replace(graph, in_place=(port,)) if graph.name == "train" else graph
        for graph in manifest.graphs
    )
    told = msgspec.structs.replace(manifest, graphs=graphs)

    if port in read:
        check_wiring(told)
        assert decode_manifest(encode_manifest(told)) == told
    else:
        with refuses(ExportError, function="train", port=port, format="onnx"):
            check_wiring(told)
        with pytest.raises(BundleError, match=f"'train' is to write '{port}' in place"):
            decode_manifest(encode_manifest(told))


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_two_ports_of_one_name_are_refused(bundles: dict[str, BundleArchive], kind: str) -> None:
    """An engine that gives memory to each name would leave one of them without any."""
    manifest = bundles["onnx"].manifest
    step = manifest.graph("train")
    ports = getattr(step, kind)
    odd = msgspec.structs.replace(step, **{kind: (*ports, ports[0])})
    graphs = tuple(odd if graph is step else graph for graph in manifest.graphs)

    with pytest.raises(BundleError, match=f"graph 'train' has port '{ports[0].name}' twice"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, graphs=graphs)))


@pytest.mark.parametrize("name", ["a\0b", "a\x1b[31m"])
def test_names_that_cannot_be_shown_are_refused(bundles: dict[str, BundleArchive], name: str) -> None:
    manifest = bundles["onnx"].manifest
    graphs = (*manifest.graphs, msgspec.structs.replace(manifest.graphs[0], name=name))

    for odd in (
        msgspec.structs.replace(manifest, tier=name),
        msgspec.structs.replace(manifest, graphs=graphs),
    ):
        with pytest.raises(BundleError, match="cannot be shown"):
            decode_manifest(encode_manifest(odd))


def test_less_than_no_memory_is_refused(bundles: dict[str, BundleArchive]) -> None:
    manifest = bundles["onnx"].manifest
    graphs = tuple(msgspec.structs.replace(graph, planned_bytes=-1) for graph in manifest.graphs)

    with pytest.raises(BundleError, match="planned to need -1 bytes"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, graphs=graphs)))


def test_a_format_that_there_is_not_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no format 'tflite'; there are: onnx, executorch"):
        target_of("tflite")


def test_a_format_whose_package_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("edgefl_export.executorch.target.metadata.version", missing)

    check_installed(["onnx"])
    with pytest.raises(ConfigError, match=r"pip install 'edgefl-tiers\[executorch\]'"):
        check_installed(["onnx", "executorch"])


def test_a_spec_of_any_type_that_ports_may_have_is_told_alike_by_both() -> None:
    """The numbers that ExecuTorch has for types are those that a manifest names."""
    dtypes = {"a": torch.uint8, "b": torch.int64, "c": torch.bool, "d": torch.float32, "e": torch.int32}
    inputs = {f"state.{name}": TensorSpec((2, 3), dtype) for name, dtype in dtypes.items()}
    function = Function("kinds", lambda t: {key: value.clone() for key, value in t.items()}, inputs)

    for name in FORMATS:
        graph, model = graph_of(name, function)
        assert target_of(name).port_mismatch(graph, model) == ""


# -- A bundle's variants compute what torch does -----------------------------------------------------------


SHAPE = (3, 8, 8)


@pytest.fixture(scope="module")
def algorithm() -> Algorithm:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Flatten()]
        net = nn.Sequential(OrderedDict(body=nn.Sequential(*parts), head=nn.Linear(1024, 4)))
        spec = split(net, sample=TensorSpec(SHAPE), classes=4)
    return sgd(Objective(spec.module, spec.sample), batch=4, momentum=0.9)


def variants_built(algorithm: Algorithm) -> BundleArchive:
    data = DataSpec(shape=SHAPE, dtype="float32", classes=4)
    return build_bundle(algorithm, ("body", "head"), model="net", tier="strong", data=data)


def test_a_variant_computes_what_torch_does_and_travels_as_changes(algorithm: Algorithm) -> None:
    bundle = variants_built(algorithm)
    graph = bundle.manifest.graph("train")
    [variant] = graph.variants

    other = decompress(variant, bundle.blobs[variant.blob.sha256], base=bundle.graph_bytes("train"))

    assert variant.name == "blocked" and variant.blob.size < variant.raw / 4
    assert variant.blob in bundle.manifest.blobs
    assert verify(algorithm.phases[0].function, other, 1, graph.in_place).worst < 1e-4
    assert not any(each.variants for each in bundle.manifest.graphs if each.name != "train")


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["another layout", "ops that nobody has"])
def test_a_wrong_one_is_left_out(algorithm: Algorithm, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(model: bytes) -> bytes:
        proto = onnx.load_from_string(write_blocked(model) or b"")
        for node in proto.graph.node:
            if kind == "another layout" and node.op_type == "ReorderInput" and "w" not in node.input[0]:
                node.op_type, node.domain = "Identity", ""
            elif kind != "another layout" and node.op_type == "ReorderInput":
                node.op_type = "NobodyHasIt"
        return bytes(proto.SerializeToString())

    monkeypatch.setattr(target, "write_blocked", damaged)

    assert not variants_built(algorithm).manifest.graph("train").variants

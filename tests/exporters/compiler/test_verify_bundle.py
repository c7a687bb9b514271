"""`edgefl verify`: a bundle beside the functions it claims to hold, whole and tampered with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner, Result

from edgefl.cli import app
from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import TensorSpec
from edgefl.errors import BundleError, ConfigError, EdgeflError, ExportError
from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import BundleArchive, read_bundle, write_bundle
from edgefl.wire.bundle.manifest import Graph, Manifest, Port
from edgefl_export.compiler.verify import verify_bundle
from tests.support.bundles import request_of

CHUNK = 1 << 17
CONFIG = """
[model]
name = "mlp"
options = { hidden = [2, 3, 4] }
[algorithm]
batch = 4
steps = 3
momentum = 0.8
[data]
name = "digits"
[tiers.weak]
cut = 2
chunks = 2
count = 1
"""


def edgefl(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(ran: Result, kind: type[EdgeflError], text: str) -> None:
    assert isinstance(ran.exception, kind), ran.output
    assert text in ran.exception.message


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verify") / "federation.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def exported(config: Path) -> Path:
    assert edgefl("export", config, "--out", config.parent).exit_code == 0
    return config.parent / "weak.efl"


def rewritten(exported: Path, change: Callable[[BundleArchive], BundleArchive], out: Path) -> Path:
    """The bundle after ``change``, in a file whose digests are all right."""
    write_bundle(change(read_bundle(exported)), out / "changed.efl")
    return out / "changed.efl"


def with_manifest(**changes: object) -> Callable[[BundleArchive], BundleArchive]:
    return lambda bundle: BundleArchive(msgspec.structs.replace(bundle.manifest, **changes), bundle.blobs)


def with_graph(bundle: BundleArchive, name: str, model: bytes) -> BundleArchive:
    """The bundle with other bytes for one graph, and a manifest that vouches for them."""
    ref = describe(model, CHUNK)
    graphs = tuple(
        msgspec.structs.replace(graph, blob=ref) if graph.name == name else graph
        for graph in bundle.manifest.graphs
    )
    manifest: Manifest = msgspec.structs.replace(bundle.manifest, graphs=graphs)
    return BundleArchive(manifest, {**bundle.blobs, ref.sha256: model})


def with_another_constant(bundle: BundleArchive) -> BundleArchive:
    """Momentum 0.8 becomes 0.808 in the graph of the steps."""
    model = onnx.load_from_string(bundle.graph_bytes("train"))
    changed = 0
    for constant in model.graph.initializer:
        value = numpy_helper.to_array(constant)
        if value.size == 1 and value.dtype == np.float32 and abs(float(value.item()) - 0.8) < 1e-6:
            constant.CopyFrom(numpy_helper.from_array((value * 1.01).astype(np.float32), constant.name))
            changed += 1
    assert changed, "the graph holds no momentum"
    return with_graph(bundle, "train", model.SerializeToString())


def test_an_exported_bundle_agrees_with_torch(exported: Path, config: Path) -> None:
    ran = edgefl("verify", exported, config, "--json")

    told = json.loads(ran.stdout)
    assert ran.exit_code == 0 and told["ok"] and not told["problems"]
    names = [graph["graph"] for graph in told["graphs"]]
    assert names == ["forward.1", "forward.2", "start", "train", "finish", "evaluate"]
    assert all(graph["ok"] and graph["max_rel_error"] <= 1e-4 for graph in told["graphs"])
    train = next(graph for graph in told["graphs"] if graph["graph"] == "train")
    assert {"metric.loss", "state.momentum.head.dense.weight"} <= train["errors"].keys()


def test_the_table_says_that_all_agrees(exported: Path, config: Path) -> None:
    ran = edgefl("verify", exported, config)

    assert ran.exit_code == 0 and "every graph agrees with torch" in ran.stdout


def test_a_changed_constant_is_caught(exported: Path, config: Path, tmp_path: Path) -> None:
    changed = rewritten(exported, with_another_constant, tmp_path)

    ran = edgefl("verify", changed, config, "--json")

    told = json.loads(ran.stdout)
    assert ran.exit_code == 1 and not told["ok"]
    assert [graph["graph"] for graph in told["graphs"] if not graph["ok"]] == ["train"]
    assert "differs from torch" in next(graph["problem"] for graph in told["graphs"] if not graph["ok"])


def test_a_graph_that_does_something_else_is_caught(exported: Path, config: Path, tmp_path: Path) -> None:
    def swapped(bundle: BundleArchive) -> BundleArchive:
        return with_graph(bundle, "finish", bundle.graph_bytes("start"))

    ran = edgefl("verify", rewritten(exported, swapped, tmp_path), config, "--json")

    assert ran.exit_code == 1
    assert [graph["graph"] for graph in json.loads(ran.stdout)["graphs"] if not graph["ok"]] == ["finish"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"batch": 5}, "batch: 5 in the bundle, 4 expected"),
        ({"hyper": {"lr": 9.0}}, "hyper-parameters: {'lr': 9.0} in the bundle, {'lr': 0.05} expected"),
        ({"parameters": 7}, "trained parameters: 7 in the bundle, "),
    ],
)
def test_other_numbers_are_told(
    exported: Path, config: Path, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    ran = edgefl("verify", rewritten(exported, with_manifest(**changes), tmp_path), config, "--json")

    (told,) = json.loads(ran.stdout)["problems"]
    assert ran.exit_code == 1 and told.startswith(problem)


def inputs_changed(
    name: str, change: Callable[[tuple[Port, ...]], tuple[Port, ...]]
) -> Callable[[BundleArchive], BundleArchive]:
    """Another list of inputs in the manifest for graph ``name``, whose bytes stay."""

    def changed(bundle: BundleArchive) -> BundleArchive:
        graphs = tuple(
            msgspec.structs.replace(graph, inputs=change(graph.inputs)) if graph.name == name else graph
            for graph in bundle.manifest.graphs
        )
        return with_manifest(graphs=graphs)(bundle)

    return changed


def test_an_input_that_the_manifest_omits_is_told(exported: Path, config: Path, tmp_path: Path) -> None:
    def omitted(ports: tuple[Port, ...]) -> tuple[Port, ...]:
        return tuple(port for port in ports if port.name != "hyper.lr")

    changed = rewritten(exported, inputs_changed("train", omitted), tmp_path)
    ran = edgefl("verify", changed, config, "--json")

    problems = {
        graph["graph"]: graph["problem"] for graph in json.loads(ran.stdout)["graphs"] if not graph["ok"]
    }
    assert ran.exit_code == 1
    assert problems == {"train": "the graph reads hyper.lr, which the manifest does not list"}


def test_an_input_that_the_graph_does_not_read_is_told(exported: Path, config: Path, tmp_path: Path) -> None:
    def without_learning_rate(bundle: BundleArchive) -> BundleArchive:
        model = onnx.load_from_string(bundle.graph_bytes("train"))
        (port,) = [value for value in model.graph.input if value.name == "hyper.lr"]
        model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "hyper.lr"))
        model.graph.input.remove(port)
        return with_graph(bundle, "train", model.SerializeToString())

    ran = edgefl("verify", rewritten(exported, without_learning_rate, tmp_path), config)

    assert ran.exit_code == 1
    assert "lists hyper.lr, which the graph does not read" in " ".join(ran.stdout.split())


def test_a_port_of_another_role_is_told(exported: Path) -> None:
    function = Function("f", lambda t: {"update.w": t["weights.w"] * 2}, {"weights.w": TensorSpec((3,))})
    port = Port(name="weights.w", role="state", dtype="float32", shape=(3,))
    step = Function("train", lambda t: {"state.x": t["batch.0.x"]}, {"batch.0.x": TensorSpec((4, 3))})
    algorithm = Algorithm("p", function, (Phase("train", step, 1),), function, function)
    blob = describe(b"", CHUNK)
    graph = Graph(name="f", format="onnx", blob=blob, inputs=(port,), outputs=())
    manifest = msgspec.structs.replace(read_bundle(exported).manifest, graphs=(graph,))

    check = verify_bundle(
        BundleArchive(manifest, {blob.sha256: b""}), request_of(algorithm, (), data=manifest.data)
    )

    assert check.graphs[0].problem == (
        "input 'weights.w' is state float32[3] in the manifest and float32[3] in torch"
    )


def test_a_port_of_another_shape_is_told(exported: Path, config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(CONFIG.replace("[2, 3, 4]", "[2, 3, 5]"))

    ran = edgefl("verify", exported, other)

    assert ran.exit_code == 1
    assert "float32[4, 3] in the manifest and float32[5, 3] in torch" in " ".join(ran.stdout.split())


def test_without_a_file_the_bundle_is_held_against_the_defaults(tmp_path: Path) -> None:
    assert edgefl("export", "--model", "mlp", "--out", tmp_path).exit_code == 0

    assert edgefl("verify", tmp_path / "strong.efl").exit_code == 0


def test_without_a_file_other_options_differ_and_the_remedy_is_told(exported: Path) -> None:
    ran = edgefl("verify", exported)

    assert ran.exit_code == 1 and "name its federation file" in " ".join(ran.stdout.split())


def test_a_tier_that_the_file_does_not_have_is_told(exported: Path, config: Path, tmp_path: Path) -> None:
    renamed = rewritten(exported, with_manifest(tier="tiny"), tmp_path)

    refused(edgefl("verify", renamed, config), ConfigError, "tier 'tiny'; the file has weak")


def test_a_graph_without_function_is_told(exported: Path, config: Path, tmp_path: Path) -> None:
    def extra(bundle: BundleArchive) -> BundleArchive:
        graphs = bundle.manifest.graphs
        more = msgspec.structs.replace(graphs[-1], name="personalize")
        return with_manifest(graphs=(*graphs, more))(bundle)

    ran = edgefl("verify", rewritten(exported, extra, tmp_path), config)

    refused(ran, BundleError, "expected a function for graph 'personalize', found none")


def test_a_damaged_file_is_told(exported: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.efl"
    damaged.write_bytes(exported.read_bytes()[:-100])

    refused(edgefl("verify", damaged), BundleError, "not a whole bundle")


@pytest.mark.slow
def test_a_bundle_with_halves_is_compared_with_such_steps(tmp_path: Path) -> None:
    options = ("--tier", "strong", "--activations", "float16", "--out", tmp_path)
    assert edgefl("export", "--model", "fedbat_cnn", *options).exit_code == 0

    bundle = read_bundle(tmp_path / "strong.efl")
    step = onnx.load_from_string(bundle.graph_bytes("train"))
    assert bundle.manifest.graph("train").activations == "float16"
    assert onnx.TensorProto.FLOAT16 in {item.i for node in step.graph.node for item in node.attribute}
    assert edgefl("verify", tmp_path / "strong.efl").exit_code == 0


# -- ``edgefl export --memory-budget`` and ``--activations`` -----------------------------------------------


EXPORT_COMMAND_CONFIG = """
[model]
name = "mlp"
options = {{ hidden = [5] }}
[algorithm]
batch = 4
steps = 2
[data]
name = "digits"
[tiers.strong]
count = 1
{budget}
"""


def export_command_exported(folder: Path, *options: str, budget: str = "") -> Graph:
    """The step in the bundle that the command writes; raises what the command raises."""
    (folder / "federation.toml").write_text(EXPORT_COMMAND_CONFIG.format(budget=budget))
    ran = CliRunner().invoke(app, ["export", str(folder / "federation.toml"), "--out", str(folder), *options])
    if isinstance(ran.exception, EdgeflError):
        raise ran.exception
    assert ran.exit_code == 0, ran.output
    return read_bundle(folder / "strong.efl").manifest.graph("train")


def test_the_option_is_written_beside_the_step(tmp_path: Path) -> None:
    with_it, without = (
        export_command_exported(tmp_path, "--memory-budget", "64MiB"),
        export_command_exported(tmp_path),
    )

    assert (with_it.memory_budget, without.memory_budget) == (64 * 2**20, 0)
    assert with_it.blob == without.blob


def test_without_it_the_tier_s_own_budget_holds(tmp_path: Path) -> None:
    assert export_command_exported(tmp_path, budget='memory_budget = "65MiB"').memory_budget == 65 * 2**20


def test_the_option_goes_before_the_tier_s_own_budget(tmp_path: Path) -> None:
    step = export_command_exported(tmp_path, "--memory-budget", "70 MB", budget='memory_budget = "65MiB"')

    assert step.memory_budget == 70_000_000


@pytest.mark.parametrize("text", ["much", "0", "7 TiB"])
def test_an_option_that_is_no_size_is_told(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="48MiB or a share such as 50%"):
        export_command_exported(tmp_path, "--memory-budget", text)

    assert not (tmp_path / "strong.efl").exists()


def test_how_values_wait_is_said_by_the_tier_and_by_the_option_before_it(tmp_path: Path) -> None:
    told = 'activations = "float16"'
    assert export_command_exported(tmp_path).activations == "float32"
    assert export_command_exported(tmp_path, budget=told).activations == "float16"
    assert export_command_exported(tmp_path, "--activations", "float32", budget=told).activations == "float32"


def test_a_tier_s_values_cannot_wait_as_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.strong\.activations.*'float32' or 'float16'"):
        export_command_exported(tmp_path, budget='activations = "int8"')


def test_a_budget_that_cannot_be_met_writes_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"'train' does not fit a memory budget of 1\.0 MiB"):
        export_command_exported(tmp_path, "--memory-budget", "1MiB")

    assert not (tmp_path / "strong.efl").exists()

"""The bundle of a tier: complete, checked, and shared between tiers where functions are equal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.errors import ExportError
from edgefl.wire.bundle.archive import Bundle, read_bundle, write_bundle
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_export.compiler.request import FrozenChunk
from tests.exporters.examples import BATCH, step_of
from tests.support.bundles import build_bundle

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


def build(algorithm: Algorithm, prefix: tuple[FrozenChunk, ...], tier: str = "weak") -> Bundle:
    return build_bundle(algorithm, ("head",), prefix=prefix, model="net", tier=tier, data=DATA)


@pytest.fixture(scope="module")
def suffix() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(4 * 4 * 4, 3))


@pytest.fixture(scope="module")
def conv() -> FrozenChunk:
    return FrozenChunk(("conv",), forward_of(nn.Conv2d(3, 4, 3), (3, 6, 6)))


@pytest.fixture(scope="module")
def built(suffix: nn.Sequential, conv: FrozenChunk) -> tuple[Bundle, list[str]]:
    """A bundle with a prefix, and what was said while it was built."""
    said: list[str] = []
    algorithm = algorithm_of(suffix, (4, 4, 4))
    return build_bundle(
        algorithm, ("head",), prefix=(conv,), model="net", tier="weak", data=DATA, on_progress=said.append
    ), said


def test_bundle_has_every_graph_and_survives_a_file(built: tuple[Bundle, list[str]], tmp_path: Path) -> None:
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


def test_equal_functions_of_tiers_share_blobs(suffix: nn.Sequential, built: tuple[Bundle, list[str]]) -> None:
    weak, _ = built
    other = build(algorithm_of(suffix, (4, 4, 4)), (), tier="other")

    assert {graph.blob.sha256 for graph in other.manifest.graphs} < set(weak.blobs)
    assert other.encoded != weak.encoded


def test_progress_names_each_graph(built: tuple[Bundle, list[str]]) -> None:
    _, said = built

    assert len(said) == 5 and "train" in " ".join(said)


def test_a_state_nobody_leaves_is_told(suffix: nn.Sequential) -> None:
    algorithm = algorithm_of(suffix, (4, 4, 4))
    start = Function("start", lambda t: {"state.other": t["weights.x"] + 1}, {"weights.x": TensorSpec((1,))})

    with pytest.raises(ExportError, match=r"'train' reads 'state\.1\.weight' .* nothing of that name"):
        build(replace(algorithm, start=start), ())


def test_a_hyper_parameter_without_default_is_told(suffix: nn.Sequential) -> None:
    with pytest.raises(ExportError, match=r"reads \['lr'\] but gives no default"):
        build(replace(algorithm_of(suffix, (4, 4, 4)), hyper={}), ())


def test_a_prefix_cut_elsewhere_is_told(suffix: nn.Sequential) -> None:
    wrong = FrozenChunk(("conv",), forward_of(nn.Conv2d(3, 4, 5), (3, 6, 6)))

    with pytest.raises(
        ExportError, match=r"records float32\[4, 4, 2, 2\], 'train' reads float32\[4, 4, 4, 4\]"
    ):
        build(algorithm_of(suffix, (4, 4, 4)), (wrong,))


def test_two_functions_of_one_name_are_told(suffix: nn.Sequential) -> None:
    algorithm = algorithm_of(suffix, (4, 4, 4))

    with pytest.raises(ExportError, match="two functions named 'start'"):
        build(replace(algorithm, finish=replace(algorithm.finish, name="start")), ())

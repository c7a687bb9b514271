"""Digests of requests and of the source: whatever decides the bytes of a bundle decides them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from edgefl.algorithms.activations import store_activations
from edgefl.algorithms.baselines.sgd import sgd
from edgefl.codecs import catalog as codecs
from edgefl.contract.algorithm import CarryRule, Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ExportError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.basic import mlp
from edgefl.objective.objective import Objective
from edgefl.submodels import catalog as submodels
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_export.capture.trace import TraceCache, capture, decompose
from edgefl_export.compiler.algorithm import coded_algorithm
from edgefl_export.compiler.cache import SOURCES, BundleCache, source_digest
from edgefl_export.compiler.compiler import Compiler
from edgefl_export.compiler.request import CompileRequest, Exchange, TierTraining
from edgefl_export.memory.recompute import Budget
from edgefl_export.onnx.target import OnnxTarget
from edgefl_export.target import Target
from tests.exporters.examples import pointwise, step_of

DATA = DataSpec(shape=(1, 4, 4), dtype="float32", classes=2)
ONNX = OnnxTarget()


def tier(
    spec: ModelSpec | None = None,
    *,
    kind: str = "output_side",
    options: dict[str, Any] | None = None,
    algorithm: str = "sgd",
    codec: str = "dense",
    **values: Any,
) -> TierTraining:
    submodel = submodels.build(spec or mlp(size=4, hidden=[4, 3], classes=2), kind, **(options or {}))
    training = {"batch": 2, "steps": 2} | values
    return TierTraining("weak", submodel, coded_algorithm(submodel, algorithm, training, codecs.build(codec)))


def request(made: TierTraining, exchange: Exchange | None = None, **changes: Any) -> CompileRequest:
    return made.request(exchange or made.main, **({"model": "m", "data": DATA} | changes))


def digest(made: TierTraining, target: Target = ONNX, **changes: Any) -> str:
    return request(made, **changes).fingerprint(target, TraceCache())


def test_the_same_things_made_again_have_the_same_digest() -> None:
    assert digest(tier()) == digest(tier())
    assert digest(tier(mlp(size=4, hidden=[4, 3], classes=2, seed=7))) == digest(tier()), (
        "weights travel apart"
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "other",
    [
        {"options": {"cut": 1}},
        {"kind": "width", "options": {"gamma": 0.5}},
        {"kind": "importance", "options": {"gamma": 0.5}},
        {"algorithm": "fedprox"},
        {"codec": "fedpaq"},
        {"batch": 4},
        {"steps": 3},
        {"lr": 0.2},
        {"momentum": 0.5},
        {"personal": 0.01},
        {"spec": mlp(size=4, hidden=[4, 2], classes=2)},
    ],
    ids=str,
)
def test_every_part_of_a_tier_counts(other: dict[str, Any]) -> None:
    assert digest(tier(**other)) != digest(tier())


def test_how_values_wait_counts_even_where_none_is_large_enough() -> None:
    made = tier()
    assert digest(replace(made, algorithm=store_activations(made.algorithm, "float16"))) != digest(made)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"data": DataSpec(shape=(1, 4, 4), dtype="float32", classes=2, shift=0.5)},
        {"chunk_bytes": 4096},
        {"memory_budget": Budget(1 << 26)},
        {"memory_budget": Budget(0.5, relative=True)},
    ],
    ids=str,
)
def test_everything_else_that_a_bundle_is_made_of_counts(change: dict[str, Any]) -> None:
    made = tier()
    assert digest(made, **change) != digest(made)


def test_names_that_a_manifest_has_count() -> None:
    made = tier()
    renamed = TierTraining("other", made.submodel, made.algorithm)
    later = Exchange("opening", made.algorithm, ())
    kept = replace(made.algorithm, carry_rule=CarryRule(exchanges=3))
    digests = [digest(made), digest(renamed), digest(TierTraining("weak", made.submodel, kept))]
    digests.append(digest(made, exchange=later))
    assert len(set(digests)) == 4


@pytest.mark.parametrize("package", ["torch", "onnx", "onnxscript", "onnx-ir"])
def test_another_version_of_a_library_misses(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tier()
    before = digest(made)
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "999" if name == package else version(name))
    assert digest(made) != before


def test_another_format_and_another_version_of_its_writer_miss() -> None:
    class Newer(OnnxTarget):
        version = "2"

    class Other(OnnxTarget):
        name = "executorch"

    made = tier()
    assert len({digest(made), digest(made, Newer()), digest(made, Other())}) == 3


ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {"edgefl": ROOT / "edgefl", "edgefl_export": ROOT / "exporters" / "edgefl_export"}


@pytest.fixture
def packages(tmp_path: Path) -> dict[str, Path]:
    """Copies of both packages, Python files alone."""
    copies = {name: tmp_path / name for name in PACKAGES}
    for name, folder in PACKAGES.items():
        for file in folder.rglob("*.py"):
            copy = copies[name] / file.relative_to(folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return copies


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("edgefl_export/onnx/target.py", True),
        ("edgefl_export/compiler/compiler.py", True),
        ("edgefl/algorithms/baselines/sgd.py", True),
        ("edgefl/codecs/catalog.py", True),
        ("edgefl/submodels/catalog.py", True),
        ("edgefl/models/split.py", True),
        ("edgefl/models/losses/catalog.py", True),
        ("edgefl/losses.py", True),
        ("edgefl/wire/bundle/manifest.py", True),
        ("edgefl/cli/__init__.py", False),
        ("edgefl/simulator/functions.py", False),
        ("edgefl/web/offer.py", False),
    ],
)
def test_source_digest_covers_what_makes_a_bundle(packages: dict[str, Path], file: str, counts: bool) -> None:
    before = source_digest(packages)
    assert before == source_digest(PACKAGES) == source_digest()

    package, _, place = file.partition("/")
    with (packages[package] / place).open("a") as edited:
        edited.write("# edited\n")
    assert (source_digest(packages) != before) == counts


def test_source_digest_changes_with_a_new_name(packages: dict[str, Path]) -> None:
    before = source_digest(packages)
    file = packages["edgefl_export"] / "operators.py"
    file.rename(file.with_name("renamed.py"))

    assert source_digest(packages) != before


def imported(module: str) -> set[str]:
    """All modules of both packages that one imports, early or late, and what these import."""
    seen, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        path = PACKAGES[name.split(".")[0]].joinpath(*name.split(".")[1:])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name in seen or not file.exists():
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                todo += [each.name for each in node.names if each.name.split(".")[0] in PACKAGES]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                todo += [f"{node.module}", *(f"{node.module}.{each.name}" for each in node.names)]
    return seen


@pytest.mark.parametrize(
    "module",
    [
        "edgefl_export.compiler.compiler",
        *(f"edgefl.{room}.catalog" for room in ("algorithms", "codecs", "submodels", "optimizers")),
        *("edgefl.models.zoo.catalog", "edgefl.models.losses.catalog", "edgefl.losses"),
    ],
)
def test_sources_hold_all_that_a_compile_imports(module: str) -> None:
    rooms = tuple(name.removesuffix(".py").replace("/", ".") + "." for name in SOURCES)
    others = {name for name in imported(module) if not f"{name}.".startswith(rooms)}

    assert others <= {"edgefl"}, "edgefl/__init__.py names what is public, and computes nothing"


def test_compile_takes_an_equal_request_from_the_cache(tmp_path: Path) -> None:
    compiler, lines = Compiler(OnnxTarget(), BundleCache(tmp_path)), list[str]()
    first = compiler.compile(request(tier()), lines.append)
    assert not first.from_cache and lines
    lines.clear()
    second = compiler.compile(request(tier()), lines.append)
    assert second.from_cache and not lines and second.bundle == first.bundle


def test_compile_returns_a_bundle_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert not Compiler(OnnxTarget(), BundleCache(tmp_path / "file")).compile(request(tier())).from_cache


def test_compile_names_the_function_that_cannot_be_traced(tmp_path: Path) -> None:
    made = tier()

    def broken(_: object) -> Any:
        raise RuntimeError("mine")

    algorithm = replace(made.algorithm, start=replace(made.algorithm.start, fn=broken))
    with pytest.raises(ExportError) as refusal:
        Compiler(OnnxTarget(), BundleCache(tmp_path)).compile(request(replace(made, algorithm=algorithm)))
    assert refusal.value.details["function"] == "start"


# -- functions that compute the same have one fingerprint, all others another ------------------------------


def fingerprint(function: Function) -> str:
    return TraceCache().fingerprint(function)


def step(activation: Callable[[], nn.Module] = nn.ReLU, *, width: int = 4, stride: int = 1) -> Function:
    layers = [nn.Conv2d(1, width, 3, stride=stride), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return step_of(nn.Sequential(*layers, nn.Linear(width, 3)), (1, 8, 8))


def test_the_same_model_with_other_weights_is_the_same() -> None:
    torch.manual_seed(1)
    first = fingerprint(step())
    torch.manual_seed(2)
    assert fingerprint(step()) == first


@pytest.mark.parametrize(
    "other",
    [lambda: step(nn.Tanh), lambda: step(width=5), lambda: step(stride=2)],
    ids=["op", "width", "option"],
)
def test_another_structure_is_another(other: Callable[[], Function]) -> None:
    assert fingerprint(other()) != fingerprint(step())


def test_what_was_traced_for_the_digest_is_compiled_and_not_traced_again() -> None:
    made, runs = step(), list[str]()

    def counted(tensors: Tensors) -> Tensors:
        runs.append("run")
        return made.fn(tensors)

    function = replace(made, fn=counted)
    traces = TraceCache()
    digest = traces.fingerprint(function)
    lowered = decompose(traces.take(function))
    assert digest == fingerprint(made)
    assert len(runs) == 1
    assert lowered.module.code == capture(made).module.code
    traces.take(function)
    assert len(runs) == 2, "a graph is used up"


def test_a_constant_counts_with_its_value_and_a_number_too() -> None:
    def scaled(by: object) -> Function:
        return pointwise(lambda tensors: {"state.w": tensors["state.w"] * by}, state__w=(3,))  # type: ignore[dict-item]

    digests = [
        fingerprint(scaled(by)) for by in (2.0, 3.0, torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 2, 4]))
    ]
    assert len(set(digests)) == 4
    assert fingerprint(scaled(torch.tensor([1.0, 2, 3]))) == digests[2]


def test_what_is_read_and_what_is_returned_count_with_their_places() -> None:
    def of(reads: str, gives: str) -> str:
        return fingerprint(
            pointwise(lambda tensors: {gives: tensors[reads].exp()}, state__a=(3,), state__b=(3,))
        )

    assert len({of("state.a", "state.a"), of("state.b", "state.a"), of("state.a", "state.b")}) == 3


def test_ports_count_whether_they_are_read_or_not() -> None:
    def of(**shapes: tuple[int, ...]) -> str:
        return fingerprint(pointwise(lambda tensors: {"state.a": tensors["state.a"].exp()}, **shapes))

    assert of(state__a=(3,)) != of(state__a=(3,), batch__0__x=(2,))
    labels = {"batch.0.y": TensorSpec((2,), torch.int64)}
    plain = Function("f", lambda tensors: {"metric.loss": tensors["batch.0.y"].float().sum()}, labels)
    ranged = Function(plain.name, plain.fn, {"batch.0.y": TensorSpec((2,), torch.int64, below=2)})
    assert fingerprint(plain) != fingerprint(ranged)


def test_algorithms_differ_by_what_is_compiled_in_and_by_nothing_else() -> None:
    def step_with(**options: float) -> str:
        objective = Objective.of(OutputSide(mlp(size=4, hidden=[3], classes=2), 0))
        return fingerprint(sgd(objective, batch=2, **options).phases[0].function)  # type: ignore[arg-type]

    assert step_with(lr=0.1) == step_with(lr=0.2), "lr is a scalar of the task"
    assert step_with(momentum=0.9) != step_with(momentum=0.0)


@pytest.mark.slow  # the process imports torch
def test_another_process_finds_the_same() -> None:
    script = "from tests.exporters.compiler.test_digest import fingerprint, step\nprint(fingerprint(step()))"
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == fingerprint(step())

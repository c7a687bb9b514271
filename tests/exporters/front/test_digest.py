"""One digest for one bundle: whatever decides its bytes decides the digest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import edgefl_export
from edgefl.algorithms.activations import stored
from edgefl.codecs import catalog as codecs
from edgefl.contract.algorithm import CarryRule
from edgefl.errors import ExportError
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.models.zoo.basic import mlp
from edgefl.submodels import catalog as submodels
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_export.bundle.formats import Onnx
from edgefl_export.front import compile as module
from edgefl_export.front.algorithm import coded_algorithm
from edgefl_export.front.cache import BundleCache
from edgefl_export.front.compile import bundle_digest, cached, source_digest
from edgefl_export.front.order import Order
from edgefl_export.front.tier import Exchange, Tier
from edgefl_export.memory.recompute import Budget

DATA = DataSpec(shape=(1, 4, 4), dtype="float32", classes=2)


def own_model(activation: type[nn.Module]) -> ModelSpec:
    """Equal weights, equal options: only the code between differs."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), activation(), nn.Linear(3, 2))
    return split(net, None, sample=mlp(size=4).sample, classes=2, name="own")


def tier(
    spec: ModelSpec | None = None,
    *,
    kind: str = "output_side",
    options: dict[str, Any] | None = None,
    algorithm: str = "sgd",
    codec: str = "dense",
    **values: Any,
) -> Tier:
    submodel = submodels.build(spec or mlp(size=4, hidden=[4, 3], classes=2), kind, **(options or {}))
    training = {"batch": 2, "steps": 2} | values
    return Tier("weak", submodel, coded_algorithm(submodel, algorithm, training, codecs.build(codec)))


def digest(made: Tier, **changes: Any) -> str:
    return bundle_digest(replace(Order(made, made.main, model="m", data=DATA), **changes))


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
    assert digest(replace(made, algorithm=stored(made.algorithm, "float16"))) != digest(made)


def test_models_of_equal_options_and_shapes_differ_by_their_code() -> None:
    assert digest(tier(own_model(nn.ReLU))) == digest(tier(own_model(nn.ReLU)))
    assert digest(tier(own_model(nn.ReLU))) != digest(tier(own_model(nn.Tanh)))


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
    renamed = Tier("other", made.submodel, made.algorithm)
    later = Exchange("opening", made.algorithm, ())
    kept = replace(made.algorithm, carry_rule=CarryRule(exchanges=3))
    digests = [digest(made), digest(renamed), digest(Tier("weak", made.submodel, kept))]
    digests.append(bundle_digest(Order(made, later, model="m", data=DATA)))
    assert len(set(digests)) == 4


@pytest.mark.parametrize("package", ["torch", "onnx", "onnxscript", "onnx-ir"])
def test_another_version_of_a_library_misses(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tier()
    before = digest(made)
    own = module._version
    monkeypatch.setattr(module, "_version", lambda name: "999" if name == package else own(name))
    assert digest(made) != before


def test_another_format_and_another_version_of_its_writer_miss() -> None:
    class Newer(Onnx):
        version = "2"

    class Other(Onnx):
        name = "executorch"

    made = tier()
    assert len({digest(made), digest(made, format=Newer()), digest(made, format=Other())}) == 3


def test_an_edited_source_tree_misses_without_a_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "edgefl_export"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "rule.py").write_text("A = 1\n")
    monkeypatch.setattr(edgefl_export.__spec__, "origin", str(package / "__init__.py"))

    def now() -> str:
        source_digest.cache_clear()
        return source_digest()

    try:
        before = now()
        assert now() == before
        (package / "rule.py").write_text("A = 2\n")
        edited = now()
        (package / "rule.py").rename(package / "renamed.py")
        assert len({before, edited, now()}) == 3
    finally:
        source_digest.cache_clear()


def test_a_tier_comes_out_of_the_cache_as_it_was_compiled(tmp_path: Path) -> None:
    cache, said = BundleCache(tmp_path), list[str]()
    made = tier()
    first = cached(cache, Order(made, made.main, model="m", data=DATA), said.append)
    assert first.compiled and said
    said.clear()
    made = tier()
    second = cached(cache, Order(made, made.main, model="m", data=DATA), said.append)
    assert not second.compiled and not said and second.bundle == first.bundle


def test_a_function_that_fails_is_told_by_the_compiler(tmp_path: Path) -> None:
    made = tier()

    def broken(_: object) -> Any:
        raise RuntimeError("mine")

    start = replace(made.algorithm.start, fn=broken)
    algorithm = replace(made.algorithm, start=start)
    with pytest.raises(ExportError, match="start"):
        broken_tier = Tier("weak", made.submodel, algorithm)
        cached(BundleCache(tmp_path), Order(broken_tier, Exchange("", algorithm, ()), model="m", data=DATA))

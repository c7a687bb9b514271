"""`python -m benchmarks memory`: what the step of a bundle is compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import plain_graph
from benchmarks.workers.bundle import load
from edgefl.config import Federation, parse
from edgefl.setup.bundles import bundle_of
from edgefl.setup.data import open_data
from edgefl.setup.model import federation_model
from edgefl.setup.training import tier_of
from edgefl.wire.bundle.archive import BundleArchive, read_bundle, write_bundle

pytestmark = pytest.mark.slow


def federation() -> Federation:
    tables = {
        "federation": {"name": "compared"},
        "model": {"name": "resnet8", "options": {"widths": [4, 4, 4]}},
        "algorithm": {"batch": 8},
        "data": {"name": "random", "train_samples": 8, "test_samples": 8},
        "tiers": {"strong": {"cut": 0}},
    }
    return parse(tables, source="a test")


@pytest.fixture(scope="module", params=["onnx", "executorch"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A bundle, and the training graph that its own is compared with."""
    settings, folder = federation(), tmp_path_factory.mktemp("compared")
    dataset = open_data(settings)
    tier = tier_of(settings, federation_model(settings, dataset), "strong")
    bundle = bundle_of(settings, dataset, tier, tier.main, format=request.param).bundle
    path = folder / "strong.efl"
    write_bundle(bundle, path)
    return path, plain_graph(path, settings, dataset, folder / "strong.plain")


def _training(bundle: BundleArchive) -> tuple[str, bytes]:
    graph = bundle.manifest.graph(bundle.manifest.phases[0].graph)
    return graph.format, bundle.graph_bytes(graph.name)


def test_only_executorch_is_compiled_again(made: tuple[Path, Path]) -> None:
    path, plain = made

    format, graph = _training(read_bundle(path))

    assert (plain.read_bytes() != graph) == (format == "executorch")


def test_both_sides_of_the_comparison_run(made: tuple[Path, Path]) -> None:
    path, plain = made

    for compared in (None, plain):
        step = load(path, 1, compared)
        step()
        step()

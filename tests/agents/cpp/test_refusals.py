"""Graphs that the C++ agent's engines refuse: each by name and with its reason, before they are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

from edgefl.wire.blobs import describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Graph
from tests.agents.cpp.offline import Place, Told, random_data, random_weights
from tests.device_runtime import tiny, tiny_pte
from tests.device_runtime.engine.test_onnx_engine import LONG, SHORT, leaking
from tests.device_runtime.tiny import WIDTH, W, port
from tests.pairs import in_turn

TRAIN = tiny.train()[0]
WRONG: dict[str, dict[str, Any]] = {
    "one input less": {"inputs": TRAIN.inputs[:-1]},
    "one output more": {"outputs": (*TRAIN.outputs, port("metric.acc", ()))},
    "shape": {"inputs": (port(W.name, (WIDTH, 2)), *TRAIN.inputs[1:])},
    "rank": {"inputs": (port(W.name, (WIDTH,)), *TRAIN.inputs[1:])},
    "type": {"inputs": (port(W.name, W.shape, "float64"), *TRAIN.inputs[1:])},
}


def bundle_of(form: str) -> BundleArchive:
    return tiny_pte.make_bundle(()) if form == "executorch" else tiny.make_bundle(())


def with_train(bundle: BundleArchive, data: bytes | None = None, **changes: Any) -> BundleArchive:
    """``bundle`` with another entry of its step, and other bytes of it, where they are given."""
    blobs = dict(bundle.blobs)
    if data is not None:
        changes["blob"] = describe(data, tiny.CHUNK)
        blobs[changes["blob"].sha256] = data

    def changed(graph: Graph) -> Graph:
        return msgspec.structs.replace(graph, **changes) if graph.name == "train" else graph

    manifest = msgspec.structs.replace(bundle.manifest, graphs=tuple(map(changed, bundle.manifest.graphs)))
    return BundleArchive(manifest, {ref.sha256: blobs[ref.sha256] for ref in manifest.blobs})


def told(folder: Path, bundle: BundleArchive) -> Told:
    manifest = tiny.make_bundle(()).manifest
    data = random_data(manifest, folder / "data.npz")
    return Place.of(folder, bundle, random_weights(manifest), data).in_cpp()


def refused(folder: Path, bundle: BundleArchive) -> str:
    """What is said of a bundle that is refused."""
    ended = told(folder, bundle)
    assert ended.code == 1
    return ended.error


@pytest.mark.parametrize("form", ["onnx", "executorch"])
def test_the_bundles_that_these_tests_spoil_are_sound(tmp_path: Path, form: str) -> None:
    assert told(tmp_path, bundle_of(form)).code == 0


@pytest.mark.parametrize(("what", "form"), in_turn(list(WRONG)))
def test_ports_that_differ_from_the_manifest_are_refused(tmp_path: Path, what: str, form: str) -> None:
    error = refused(tmp_path, with_train(bundle_of(form), **WRONG[what]))

    assert "graph 'train' and its manifest disagree on" in error


def test_a_program_that_plans_more_than_its_manifest_says_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, with_train(bundle_of("executorch"), planned_bytes=1))

    assert "graph 'train' is listed with 1 bytes, and its program plans" in error


@pytest.mark.parametrize("delegated", [False, True])
def test_an_operator_or_delegate_that_is_missing_is_refused_by_name(tmp_path: Path, delegated: bool) -> None:
    known, other = (b"XnnpackBackend", b"YnnpackBackend") if delegated else (b"aten::mm", b"aten::zz")
    data = tiny_pte.train(delegated=delegated)[1].replace(known, other)

    error = refused(tmp_path, with_train(bundle_of("executorch"), data))

    assert "cannot load graph 'train': " in error
    assert other.decode() in error


def test_a_program_whose_inputs_are_in_its_own_memory_is_refused(tmp_path: Path) -> None:
    data = tiny_pte.pte(tiny_pte.step, TRAIN.inputs, planned=True)

    error = refused(tmp_path, with_train(bundle_of("executorch"), data))

    assert "state.weights.head.w: it is in memory that the program planned itself" in error


@pytest.mark.parametrize("form", [SHORT, *LONG])
def test_a_model_that_reads_numbers_from_a_file_of_the_device_is_refused(tmp_path: Path, form: bytes) -> None:
    error = refused(tmp_path, with_train(bundle_of("onnx"), leaking(form)))

    assert "graph 'train' reads numbers from a file of this device" in error


def test_a_model_that_speaks_of_a_location_otherwise_is_run(tmp_path: Path) -> None:
    model = onnx.load_from_string(tiny.train()[1])
    model.doc_string = model.producer_name = "location"

    assert told(tmp_path, with_train(bundle_of("onnx"), model.SerializeToString())).code == 0


@pytest.mark.parametrize("data", [b"", b"no graph", tiny.train()[1][:200]])
def test_a_model_that_is_none_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    assert "cannot load graph 'train'" in refused(tmp_path, with_train(bundle_of("onnx"), data))

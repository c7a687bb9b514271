"""The bundle's file and its manifest: whole, or refused with a message."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgefl import errors
from edgefl.wire.blobs import describe
from edgefl.wire.bundle import manifest
from edgefl.wire.bundle.archive import MANIFEST_NAME, read_bundle, write_bundle
from edgefl.wire.bundle.manifest import Graph, Manifest, PhaseSpec, Port
from tests.support.errors import BundleError, EdgeflError, refuses
from tests.wire.example_manifests import example_bundle, example_manifest
from tests.wire.make_golden import bundle_bytes

WHOLE = bundle_bytes()
MANIFEST = manifest.encode_manifest(example_manifest())
on_one_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def test_a_written_bundle_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "b.edgefl"
    write_bundle(example_bundle(), path)

    assert read_bundle(path) == example_bundle()
    assert [file.name for file in path.parent.iterdir()] == ["b.edgefl"]


def test_equal_bundles_are_equal_files() -> None:
    assert bundle_bytes() == WHOLE


def test_graph_bytes_are_those_the_manifest_names() -> None:
    assert example_bundle().graph_bytes("train") == b"graph bytes: train"


def test_the_name_of_a_bundle_is_the_digest_of_its_manifest() -> None:
    assert example_bundle().ref(1024) == describe(MANIFEST, 1024)


def test_a_graph_without_memory_budget_says_nothing_of_one() -> None:
    graph = example_manifest().graphs[0]

    encoded = msgspec.msgpack.encode(graph)

    assert graph.memory_budget == 0 and b"memory_budget" not in encoded
    assert msgspec.msgpack.decode(encoded, type=Graph) == graph


def test_a_memory_budget_survives_its_bytes() -> None:
    graph = msgspec.structs.replace(example_manifest().graphs[0], memory_budget=64 << 20)
    whole = msgspec.structs.replace(example_manifest(), graphs=(graph, *example_manifest().graphs[1:]))

    assert manifest.decode_manifest(manifest.encode_manifest(whole)) == whole
    assert manifest.encode_manifest(whole) != MANIFEST


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with refuses(BundleError, path=str(tmp_path / "nowhere.edgefl")):
        read_bundle(tmp_path / "nowhere.edgefl")


@pytest.mark.parametrize("data", [b"", b"PK", b"not a zip at all", bytes(5000)])
def test_a_file_that_is_no_zip_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "b.edgefl"
    path.write_bytes(data)

    with refuses(BundleError, path=str(path), error=...):
        read_bundle(path)


def test_a_folder_in_place_of_a_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        read_bundle(tmp_path)


@pytest.mark.parametrize(
    ("blob", "details"),
    [
        (None, {"path": ..., "error": ...}),
        (b"other bytes", {"sha256": ...}),
        (bytes(64 << 20), {"size": 67108864, "limit": 18}),
    ],
    ids=["no graph", "other bytes than its digest's", "huge, before it is unpacked"],
)
def test_a_zip_with_a_wrong_graph_is_refused(
    tmp_path: Path, blob: bytes | None, details: dict[str, object]
) -> None:
    path = tmp_path / "b.edgefl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MANIFEST_NAME, MANIFEST)
        for sha256 in example_bundle().blobs if blob is not None else ():
            archive.writestr(f"blobs/{sha256}", blob or b"")

    with refuses(BundleError, **details):
        read_bundle(path)


@on_one_file
@given(cut=st.integers(0, len(WHOLE) - 1))
def test_a_truncated_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "b.edgefl"
    path.write_bytes(WHOLE[:cut])

    with pytest.raises(BundleError):
        read_bundle(path)


def _reads_whole_or_refuses(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        found = read_bundle(path)
    except BundleError:
        return
    assert found == example_bundle()


def test_a_flipped_bit_in_any_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """Some bytes of a zip (dates, attributes) mean nothing to us; no other change may pass."""
    for place in range(len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[place] ^= (0x01, 0x80, 0x10)[place % 3]
        _reads_whole_or_refuses(tmp_path / "b.edgefl", bytes(damaged))


@on_one_file
@given(place=st.integers(0, len(WHOLE) - 1), insert=st.binary(max_size=8), drop=st.integers(0, 8))
def test_any_edit_is_refused_or_harmless(tmp_path: Path, place: int, insert: bytes, drop: int) -> None:
    _reads_whole_or_refuses(tmp_path / "b.edgefl", WHOLE[:place] + insert + WHOLE[place + drop :])


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(BundleError):
        manifest.decode_manifest(data)


@given(place=st.integers(0, len(MANIFEST) - 1), value=st.integers(0, 255))
def test_a_damaged_manifest_is_refused_or_consistent(place: int, value: int) -> None:
    damaged = bytearray(MANIFEST)
    damaged[place] = value
    try:
        found = manifest.decode_manifest(bytes(damaged))
    except BundleError:
        return
    assert [port.nbytes >= 0 for graph in found.graphs for port in (*graph.inputs, *graph.outputs)]
    assert all(found.graph(phase.graph) for phase in found.phases)


def test_a_nested_manifest_is_refused() -> None:
    with pytest.raises(BundleError):
        manifest.decode_manifest(b"\x81\xa1x" + b"\x91" * 200_000 + b"\x01")


def _changed(**fields: object) -> Manifest:
    return msgspec.structs.replace(example_manifest(), **fields)


def _with_port(port: Port) -> Manifest:
    graphs = example_manifest().graphs
    broken: Graph = msgspec.structs.replace(graphs[0], inputs=(port,))
    return _changed(graphs=(broken, *graphs[1:]))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: _changed(finish="nowhere"), "names graph 'nowhere' but does not list it"),
        (lambda: _changed(phases=(PhaseSpec(name="p", graph="other", steps=1),)), "graph 'other'"),
        (lambda: _changed(phases=(PhaseSpec(name="p", graph="train", steps=-1),)), "must be positive"),
        (lambda: _changed(batch=0), "must be positive"),
        (
            lambda: _with_port(Port(name="weights.w", role="state", dtype="float32", shape=(1,))),
            "'weights.w' of graph 'start' is inconsistent",
        ),
        (
            lambda: _with_port(Port(name="weights.w", role="weights", dtype="float32", shape=(-1,))),
            "inconsistent",
        ),
        (
            lambda: _with_port(Port(name="weights.w", role="weights", dtype="floot32", shape=(1,))),
            "inconsistent",
        ),
        (
            lambda: _with_port(Port(name="weights.w", role="weights", dtype="object", shape=(1,))),
            "inconsistent",
        ),
    ],
)
def test_an_inconsistent_manifest_is_refused(make: Callable[[], Manifest], text: str) -> None:
    with pytest.raises(BundleError, match=text):
        manifest.decode_manifest(manifest.encode_manifest(make()))


def test_a_port_knows_its_label_and_bytes() -> None:
    port = Port(name="weights.block1.conv.weight", role="weights", dtype="float32", shape=(2, 3))

    assert (port.label, port.nbytes) == ("block1.conv.weight", 24)


def test_steps_are_summed_over_phases() -> None:
    phases = (PhaseSpec(name="a", graph="train", steps=3), PhaseSpec(name="b", graph="train", steps=4))

    assert _changed(phases=phases).steps == 7


def test_every_error_has_its_own_exit_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not EdgeflError]
    codes = [vars(kind)["exit_code"] for kind in kinds if "exit_code" in vars(kind)]

    assert len(set(codes)) == len(codes)
    assert all(code > 1 for code in codes)

"""The frozen bytes of protocol version 1. If one of these fails, phones in the field no longer understand us."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.wire import patches, tensors
from edgefl.wire.blobs import BlobRef, decompress
from edgefl.wire.bundle import manifest
from edgefl.wire.bundle.archive import read_bundle, write_bundle
from edgefl.wire.bundle.manifest import DataSpec, Graph, Manifest, PhaseSpec, Port
from edgefl.wire.bundle.readers import ImageSpec, Reader, SeriesSpec, SoundSpec, TableSpec
from edgefl.wire.bundle.variants import Variant
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import Envelope, open_message
from edgefl.wire.mqtt.messages import Offer, ResourceUsage, Task
from edgefl.wire.mqtt.topics import Topics
from tests.support.errors import BundleError, ProtocolError, refuses
from tests.wire import example_manifests, held_out_rows, make_golden
from tests.wire.make_golden import BLOBS, FOLDER, MASK_COUNTS, MASKED, MESSAGES, READERS, TENSORS


def golden(name: str) -> bytes:
    return (FOLDER / f"{name}.bin").read_bytes()


def test_the_folder_holds_exactly_the_vectors_of_the_script() -> None:
    assert sorted(file.name for file in FOLDER.glob("*")) == sorted(make_golden.vectors())


def test_the_values_beside_the_vectors_are_theirs() -> None:
    frozen = {file.name: file.read_bytes() for file in FOLDER.glob("*.bin")}
    values = json.loads((FOLDER / make_golden.VALUES).read_text())

    assert (FOLDER / make_golden.VALUES).read_bytes() == make_golden.values_of(frozen)
    assert values["task.bin"]["seed"] == {"int": "4611686018427387905"}
    assert {f"{name}.bin" for name in MESSAGES} <= values.keys()


def test_the_held_out_rows_are_those_of_the_protocol() -> None:
    assert (FOLDER / held_out_rows.FILE).read_bytes() == held_out_rows.written()


@pytest.mark.parametrize("name", MESSAGES)
def test_message_in_both_directions(name: str) -> None:
    assert messages.encode(MESSAGES[name]) == golden(name)
    assert messages.decode(type(MESSAGES[name]), golden(name)) == MESSAGES[name]


@pytest.mark.parametrize("name", make_golden.ENVELOPES)
def test_a_signed_message_in_both_directions(name: str) -> None:
    topic, message = make_golden.ENVELOPES[name], MESSAGES[name.removeprefix("signed_")]

    assert make_golden.signed(name) == golden(name)
    opened = open_message(type(message), topic, golden(name))
    assert (opened.message, opened.at) == (message, 1 << 40)
    assert opened.key.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"


@pytest.mark.parametrize("name", BLOBS)
def test_blob_reference_in_both_directions(name: str) -> None:
    assert msgspec.msgpack.encode(BLOBS[name]) == golden(name)
    assert msgspec.msgpack.decode(golden(name), type=BlobRef) == BLOBS[name]


def test_unknown_field_is_ignored() -> None:
    data = golden("task_with_unknown_field")

    assert data != golden("task")
    assert messages.decode(Task, data) == MESSAGES["task"]


def test_other_version_is_refused_with_both_versions_in_the_message() -> None:
    with refuses(ProtocolError, version=2):
        messages.decode(Task, golden("task_of_version_2"))


@pytest.mark.parametrize("name", ["", "_of_exchanges", "_executorch", "_held_out", "_of_texts"])
def test_manifest_in_both_directions(name: str) -> None:
    example = getattr(example_manifests, f"example_manifest{name}")()

    assert manifest.encode_manifest(example) == golden(f"manifest{name}")
    assert manifest.decode_manifest(golden(f"manifest{name}")) == example


def test_unknown_fields_of_a_manifest_are_ignored() -> None:
    data = golden("manifest_with_unknown_fields")

    assert data.count(b"added_later") == 3
    assert manifest.decode_manifest(data) == example_manifests.example_manifest()


def test_manifests_carry_the_format_memory_and_tokenizer() -> None:
    found = manifest.decode_manifest(golden("manifest_executorch"))
    texts = manifest.decode_manifest(golden("manifest_of_texts"))

    assert found.format == "executorch"
    assert [graph.planned_bytes for graph in found.graphs] == [1 << 20, 70 << 20, 0]
    assert texts.data.tokenizer in texts.blobs


@pytest.mark.parametrize("name", READERS)
def test_a_reader_in_both_directions(name: str) -> None:
    assert msgspec.msgpack.encode(READERS[name]) == golden(name)
    assert msgspec.msgpack.decode(golden(name), type=Reader) == READERS[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ("one",)}, "2 classes and 1 different names for them"),
        ({"names": ("one", "one")}, "2 classes and 1 different names"),
        ({"names": ("one", "\x1b[31mtwo")}, "cannot be shown"),
        ({"reader": TableSpec(columns=(), label="y")}, "columns are none: at least one, each once"),
        ({"reader": TableSpec(columns=("a", "a"), label="y")}, "columns are a, a: at least one, each once"),
        (
            {"reader": TableSpec(columns=("a",), label="y", mean=(1.0, 2.0))},
            "mean has 2 numbers for 1 columns",
        ),
        ({"reader": TableSpec(columns=("a",), label="y", deviation=(0.0,))}, "a deviation is 0"),
        ({"reader": SeriesSpec(columns=("a",), window=0, step=1)}, "window is 0, and at least 1"),
        ({"reader": SoundSpec(rate=0, length=1)}, "rate is 0, and at least 1"),
        ({"reader": SoundSpec(rate=1, length=1, features="mel")}, "graph 'mel' but does not list it"),
        ({"reader": ImageSpec(white=256)}, "white is 256, of 1 to 255"),
    ],
)
def test_data_that_cannot_be_read_are_refused(changes: dict[str, Any], message: str) -> None:
    example = example_manifests.example_manifest()
    wrong = msgspec.structs.replace(example, data=msgspec.structs.replace(example.data, **changes))

    with pytest.raises(BundleError, match=message):
        manifest.decode_manifest(manifest.encode_manifest(wrong))


def test_a_reader_that_this_release_does_not_know_is_refused() -> None:
    fields = msgspec.msgpack.decode(golden("manifest_of_texts"))
    fields["data"]["reader"]["kind"] = "video"

    with pytest.raises(BundleError, match="the manifest is malformed: Invalid value 'video'"):
        manifest.decode_manifest(msgspec.msgpack.encode(fields))


def test_manifest_of_another_version_is_refused() -> None:
    with pytest.raises(
        BundleError, match="version 2, this runtime reads 1, 3, 4 and 5: install a matching edgefl"
    ):
        manifest.decode_manifest(golden("manifest_of_version_2"))


def test_bundle_file_decodes_from_its_vector() -> None:
    found = read_bundle(FOLDER / "bundle.bin")

    assert found == example_manifests.example_bundle()


def test_bundle_file_has_the_entries_of_its_vector(tmp_path: Path) -> None:
    """Entries, not file bytes: compressors may differ in how they deflate the same entry."""
    write_bundle(example_manifests.example_bundle(), tmp_path / "b.edgefl")

    assert _entries((tmp_path / "b.edgefl").read_bytes()) == _entries(golden("bundle"))


def _entries(data: bytes) -> list[tuple[str, tuple[int, ...], int, bytes]]:
    with zipfile.ZipFile(BytesIO(data)) as archive:
        return [
            (info.filename, info.date_time, info.compress_type, archive.read(info))
            for info in archive.infolist()
        ]


@pytest.mark.parametrize(
    ("vector", "arrays", "counts"), [("tensors", TENSORS, {}), ("tensors_masked", MASKED, MASK_COUNTS)]
)
def test_tensors_in_both_directions(vector: str, arrays: tensors.Arrays, counts: dict[str, int]) -> None:
    assert tensors.dump(arrays, counts) == golden(vector)
    assert (b"sparse~gaps:1000" in golden(vector)) is bool(counts)
    found = tensors.load(golden(vector))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


def test_a_patch_leads_to_the_same_bits() -> None:
    old = tensors.load(golden("patch_old"))
    new = patches.apply_patch(old, golden("patch"))

    assert tensors.dump(new) == golden("patch_new")
    assert patches.make_patch(
        old, make_golden.PATCH_GOAL, {"head.weight", "head.bias", "stem.scale"}
    ) == golden("patch")


def test_a_zstd_frame_unfolds() -> None:
    ref = msgspec.msgpack.decode(golden("blobref_zstd"), type=BlobRef)

    assert decompress(ref, golden("zstd_frame"), 1 << 20) == make_golden.ZSTD_RAW


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_without_a_field_that_is_required_is_refused(name: str) -> None:
    kind, fields = type(MESSAGES[name]), msgspec.msgpack.decode(golden(name))
    required = [field.name for field in msgspec.structs.fields(kind) if field.required]

    assert required
    for field in required:
        with pytest.raises(ProtocolError, match=f"required field `{field}`"):
            messages.decode(kind, msgspec.msgpack.encode({k: v for k, v in fields.items() if k != field}))


def test_a_manifest_without_a_field_that_is_required_is_refused() -> None:
    fields = msgspec.msgpack.decode(golden("manifest"))
    required = [field.name for field in msgspec.structs.fields(Manifest) if field.required]

    assert {"codec", "codec_version", "draws"} <= {*required}
    for field in required:
        with pytest.raises(BundleError, match=f"required field `{field}`"):
            manifest.decode_manifest(msgspec.msgpack.encode({k: v for k, v in fields.items() if k != field}))


def test_topics_read_as_in_their_vector() -> None:
    lines = golden("topics").decode().splitlines()

    assert make_golden.topic_table() == lines
    topics = Topics("demo")
    assert topics.parse_blob(lines[1]) == ("ab" * 32, 12)
    assert [topics.parse_device(line)[1] for line in lines[2:-2]] == [
        "status",
        "hello",
        "progress",
        "tasks",
        "updates",
        "acks",
        "declines",
        "profile-requests",
        "profiles",
    ]
    assert topics.parse_offer(lines[-2]) == "0011aabbccddeeff"
    assert topics.parse_device(lines[6]) == ("phone-7", "updates", (3, 0))


def test_the_document_shows_the_bytes_of_the_task_vector() -> None:
    """docs/protocol.md is what another language is written from; its example must not drift."""
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    listing = text.rsplit("```", 2)[1].strip().splitlines()
    shown = "".join(word for line in listing for word in line.split() if _is_hex(word))

    assert bytes.fromhex(shown) == golden("task")


def _is_hex(word: str) -> bool:
    return len(word) % 2 == 0 and all(c in "0123456789abcdef" for c in word)


def test_the_document_names_every_field_limit_and_vector() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    kinds = {type(each) for each in (*MESSAGES.values(), *READERS.values())}
    kinds |= {BlobRef, Envelope, Manifest, Graph, Variant, Port, DataSpec, PhaseSpec, ResourceUsage, Offer}
    names = [field for kind in kinds for field in kind.__struct_fields__]
    names += [file.stem for file in FOLDER.glob("*.bin")]

    assert [name for name in names if f"`{name}`" not in text] == []

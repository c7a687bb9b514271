"""The byte vectors of the conformance kit: what every implementation of protocol version 1 must
read and write.

They are frozen. Write them again only together with a version bump (docs/protocol.md, "Versions")::

    python -m tests.wire.make_golden

Values are chosen so that each msgpack type and each integer width that occurs in practice is present. ``values.json`` has
those of every vector that is MessagePack, for whoever writes a reader in another language.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgefl.wire import enrolment, patches, tensors
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle import manifest, profiles
from edgefl.wire.bundle.archive import write_bundle
from edgefl.wire.bundle.readers import ImageSpec, Reader, SeriesSpec, SoundSpec, TableSpec, TextSpec
from edgefl.wire.keys import KeyPair
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import MessageCounter, MessageSigner
from edgefl.wire.mqtt.messages import (
    Ack,
    Decline,
    Hello,
    LiveRound,
    Message,
    Offer,
    ProfileAnswer,
    ProfileOffer,
    ProfileRequest,
    Progress,
    ResourceUsage,
    Round,
    Status,
    Task,
    Update,
    UpdateChunk,
)
from edgefl.wire.mqtt.topics import Topics
from edgefl_conformance.vectors.write import GOLDEN
from tests.wire import held_out_rows
from tests.wire.bundle.example_profile import example_profile
from tests.wire.example_manifests import (
    example_bundle,
    example_manifest,
    example_manifest_executorch,
    example_manifest_held_out,
    example_manifest_of_exchanges,
    example_manifest_of_texts,
)

FOLDER = GOLDEN
VALUES = "values.json"
OF_OTHER_FORMATS = (
    "bundle",
    "patch",
    "patch_new",
    "patch_old",
    "tensors",
    "tensors_masked",
    "topics",
    "zstd_frame",
)

ZSTD_RAW = (b"edgefl, " * 125)[:1000]
ZSTD_FRAME = bytes.fromhex("28b52ffd60e8027d00004065646765666c2c200100dd57152e")

BLOBS: dict[str, BlobRef] = {
    "blobref_zstd": describe(ZSTD_FRAME, 131072, raw=len(ZSTD_RAW)),
    "blobref_one_chunk": describe(b"edgefl", 131072),
    "blobref_three_chunks": describe(bytes(range(10)), 4),
    "blobref_empty": describe(b"", 131072),
}

TENSORS = {
    "head.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 4,
    "head.bias": np.array([-1.5, 2.25], dtype=np.float32),
    "count": np.array(3, dtype=np.int64),
    "empty": np.zeros((0, 2), dtype=np.float32),
}

MASK_COUNTS = {"sparse": 1000, "even": 20, "none": 12}
MASKED = {
    "sparse": np.packbits(np.isin(np.arange(1000), (3, 4, 132, 261, 999)), bitorder="little"),
    "even": np.packbits(np.arange(20) % 2 == 0, bitorder="little"),
    "none": np.zeros(2, dtype=np.uint8),
    "values": np.array([0.5, -1.0, 2.0, 4.25, -8.0], dtype=np.float32),
}
"""Masks of 1,000 entries (five held, sent as gaps of one and two bytes), of 20 (sent packed) and of 12 (none held)."""

PATCH_OLD = {
    "head.weight": np.array([[0.1, -0.2, 0.3], [1e-3, 5.0, -7.25]], dtype=np.float32),
    "head.bias": np.array([-1.5, 2.25], dtype=np.float32),
    "head.mean": np.array([0.5], dtype=np.float32),
    "stem.scale": np.array(1.0, dtype=np.float32),
}
PATCH_GOAL = {
    "head.weight": np.array([[0.15, -0.21, 0.3], [2e-3, 4.9, -7.35]], dtype=np.float32),
    "head.bias": np.array([-1.5, 2.25], dtype=np.float32),
    "head.mean": np.array([0.75], dtype=np.float32),
    "stem.scale": np.array(0.9, dtype=np.float32),
}
PATCH = patches.make_patch(PATCH_OLD, PATCH_GOAL, {"head.weight", "head.bias", "stem.scale"}) or b""

STEM = (describe(b"stem weights", 131072),)
HEAD = (describe(bytes(range(10)), 4),)
WEAK = describe(b"weak bundle", 131072)

ROUND = Round(
    run="run-7",
    round=3,
    state="open",
    model_version="9f" * 32,
    offers={"onnx": Offer(bundles={"weak": WEAK})},
    units={"stem": STEM},
    hyper={"lr": 0.05},
    base=1,
    deadline=1767225600.5,
)

PAGED = msgspec.structs.replace(
    ROUND,
    units={"stem": STEM, "head": HEAD},
    mirrors=("https://weights.example.org/demo",),
    mirrors_only=True,
    v=3,
)

LIVE = msgspec.structs.replace(
    ROUND,
    round=5,
    base=5,
    live={
        3: LiveRound(
            model_version="7c" * 32, units={"stem": (describe(b"older weights", 131072),)}, hyper={"lr": 0.1}
        )
    },
)

MESSAGES: dict[str, Message] = {
    "round_open": msgspec.structs.replace(
        ROUND,
        offers={
            "onnx": Offer(bundles={"weak": WEAK}, signatures={"weak": bytes(range(64))}),
            "executorch": Offer(
                bundles={"weak": describe(b"weak bundle for phones", 131072)},
                signatures={"weak": bytes(range(64, 128))},
            ),
        },
        units={
            "stem": STEM,
            "head": HEAD,
            "tail": (describe(b"keyframe", 131072), describe(ZSTD_FRAME, 131072, raw=1000)),
        },
    ),
    "round_with_mirrors": msgspec.structs.replace(
        ROUND, mirrors=("https://weights.example.org/demo", "http://10.0.0.7:8480")
    ),
    "round_live": LIVE,
    "round_live_paged": LIVE.paged(describe(LIVE.page, 131072)),
    "round_paged": PAGED.paged(describe(PAGED.page, 131072)),
    "status_offline": Status(online=False),
    "status_online": Status(online=True),
    "hello": Hello(
        agent="edgefl/0.1.0",
        memory_bytes=4294967296,
        cores=4,
        samples=600,
        engines={"onnxruntime": "1.22.0"},
        tier="weak",
        token="0123456789abcdef",
        proof=enrolment.prove(bytes(range(32, 64)), Topics("demo").device("phone-7").hello, bytes(range(32))),
    ),
    "task": Task(run="run-7", round=3, tier="weak", seed=2**62 + 1, nonce="0011aabb", samples=128),
    "progress": Progress(
        round=3,
        tier="weak",
        stage="train",
        step=4,
        steps=10,
        loss=1.25,
        step_ms=17.5,
        peak_bytes=73400320,
        down_bytes=65536,
        up_bytes=0,
    ),
    "update": Update(
        run="run-7",
        round=3,
        device="phone-7",
        nonce="0011aabb",
        tier="weak",
        model_version="9f" * 32,
        samples=128,
        metrics={"loss": 1.25},
        profile=ResourceUsage(
            step_ms=17.5,
            forward_ms=40.0,
            load_ms=8.25,
            idle_bytes=40000000,
            peak_bytes=73400320,
            down_bytes=1,
            down_wire_bytes=300,
        ),
        codec="dense",
        codec_version=1,
        tensors=tensors.dump({"head.bias": TENSORS["head.bias"]}),
    ),
    "update_chunk": UpdateChunk(
        nonce="0011aabb", sha256="ab" * 32, index=1, count=3, size=2500, data=b"\x00\x01\xfe\xff"
    ),
    "ack_accepted": Ack(round=3, nonce="0011aabb", status="accepted", sha256="ab" * 32),
    "ack_missing": Ack(round=3, nonce="0011aabb", status="missing", missing=[0, 2, 300], sha256="ab" * 32),
    "ack_rejected": Ack(
        round=3,
        nonce="0011aabb",
        status="rejected",
        reason="closed-round",
        text="round 4 is open",
        sha256="ab" * 32,
    ),
    "decline": Decline(round=3, nonce="0011aabb", reason="no-carry", text="it kept nothing of round 1"),
    "profile_offer": ProfileOffer(until=1767225600.5, blobs=(WEAK, *HEAD)),
    "profile_request": ProfileRequest(
        nonce="0011aabbccddeeff",
        bundles={"onnx": WEAK},
        within_s=300.0,
        repeat=20,
        signatures={"onnx": bytes(range(64))},
    ),
    "profile_taken": ProfileAnswer(nonce="0011aabbccddeeff", state="taken"),
    "profile_declined": ProfileAnswer(
        nonce="0011aabbccddeeff", state="declined", reason="no-bundle", text="this device runs executorch"
    ),
    "profile_done": ProfileAnswer(
        nonce="0011aabbccddeeff", state="done", profile=profiles.encode(example_profile())
    ),
}

ENVELOPES = {
    "signed_task": Topics("demo").device("phone-7").tasks,
    "signed_hello": Topics("demo").device("phone-7").hello,
    "signed_update_chunk": Topics("demo").device("phone-7").update(3, 1),
}
"""Messages above, each signed for a topic by the private key of the bytes 0 to 31, with the number 2^40."""
SEED = bytes(range(32))


def signed(name: str) -> bytes:
    """A vector of :data:`ENVELOPES`. Signatures of Ed25519 are no matter of chance."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.write_text(SEED.hex())
        speaker = MessageSigner(KeyPair(path), MessageCounter())
        return speaker.seal(ENVELOPES[name], MESSAGES[name.removeprefix("signed_")], 1 << 40)


READERS: dict[str, Reader] = {
    "reader_image": ImageSpec(white=16),
    "reader_table": TableSpec(
        columns=("age", "height"),
        label="buys",
        mean=(40.0, 1.7),
        deviation=(10.5, 0.25),
        others={"seen": ("when",)},
    ),
    "reader_series": SeriesSpec(columns=("ax", "ay"), window=128, step=64, label="does", channels_last=True),
    "reader_sound": SoundSpec(rate=16000, length=16000, features="features"),
    "reader_log_mel": SoundSpec(rate=16000, length=16000, mels=40, window=640, step=320, features="features"),
    "reader_text": TextSpec(),
}


def topic_table() -> list[str]:
    """One topic of each kind, in the order of the table in docs/protocol.md."""
    topics = Topics("demo")
    device = topics.device("phone-7")
    return [
        topics.current_round,
        topics.blob_chunk("ab" * 32, 12),
        device.status,
        device.hello,
        device.progress,
        device.tasks,
        device.update(3, 0),
        device.acks,
        device.declines,
        device.profile_requests,
        device.profiles,
        topics.profile("0011aabbccddeeff").offer,
        topics.profile("0011aabbccddeeff").blob_chunk("ab" * 32, 12),
    ]


def _with_extra_field(message: Message) -> bytes:
    fields = msgspec.msgpack.decode(messages.encode(message))
    return msgspec.msgpack.encode({"added_later": {"deep": [1, None, b"x"]}, **fields})


def _manifest_with_extra_fields() -> bytes:
    """In the manifest itself, a port and a phase."""
    fields = msgspec.msgpack.decode(manifest.encode_manifest(example_manifest()))
    for part in (fields, fields["phases"][0], fields["graphs"][0]["inputs"][0]):
        part["added_later"] = [1, None, b"x"]
    return msgspec.msgpack.encode(fields)


def bundle_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "example.edgefl"
        write_bundle(example_bundle(), path)
        return path.read_bytes()


def plain(value: Any) -> Any:
    """``value`` in JSON: bytes as ``{"hex": "00ff"}``, an integer beyond 2^53, which not all readers keep, as
    ``{"int": "4611686018427387905"}``.
    """
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, int) and abs(value) > 2**53:
        return {"int": str(value)}
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def values_of(found: dict[str, bytes]) -> bytes:
    """``values.json``: what each MessagePack vector decodes to, by file name."""
    decoded = {
        name: plain(msgspec.msgpack.decode(data))
        for name, data in sorted(found.items())
        if name.removesuffix(".bin") not in OF_OTHER_FORMATS
    }
    return (json.dumps(decoded, indent=1) + "\n").encode()


def vectors() -> dict[str, bytes]:
    """Every file of the folder by its name."""
    found = {name: messages.encode(message) for name, message in MESSAGES.items()}
    found |= {name: signed(name) for name in ENVELOPES}
    found |= {name: msgspec.msgpack.encode(ref) for name, ref in BLOBS.items()}
    found["task_with_unknown_field"] = _with_extra_field(MESSAGES["task"])
    found["task_of_version_2"] = messages.encode(msgspec.structs.replace(MESSAGES["task"], v=2))
    found["round_page"] = PAGED.page
    found["manifest"] = manifest.encode_manifest(example_manifest())
    found["manifest_of_exchanges"] = manifest.encode_manifest(example_manifest_of_exchanges())
    found["manifest_of_texts"] = manifest.encode_manifest(example_manifest_of_texts())
    found |= {name: msgspec.msgpack.encode(reader) for name, reader in READERS.items()}
    found["manifest_executorch"] = manifest.encode_manifest(example_manifest_executorch())
    found["manifest_held_out"] = manifest.encode_manifest(example_manifest_held_out())
    found["manifest_with_unknown_fields"] = _manifest_with_extra_fields()
    found["manifest_of_version_2"] = msgspec.msgpack.encode({"v": 2, "something": "else"})
    found["bundle"] = bundle_bytes()
    found["tensors"] = tensors.dump(TENSORS)
    found["tensors_masked"] = tensors.dump(MASKED, MASK_COUNTS)
    found["zstd_frame"] = ZSTD_FRAME
    found["patch_old"], found["patch"] = tensors.dump(PATCH_OLD), PATCH
    found["patch_new"] = tensors.dump(patches.apply_patch(PATCH_OLD, PATCH))
    found["topics"] = "\n".join(topic_table()).encode()
    files = {f"{name}.bin": data for name, data in sorted(found.items())}
    return {**files, VALUES: values_of(files), held_out_rows.FILE: held_out_rows.written()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in vectors().items():
        (FOLDER / name).write_bytes(data)
        sys.stdout.write(f"{name}: {len(data)} bytes\n")


if __name__ == "__main__":
    main()

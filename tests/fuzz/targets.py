"""Every decoder that the network reaches, as a function of bytes that ends quietly or raises an error of ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgefl.errors import EdgeflError
from edgefl.wire import blobs, patches, tensors
from edgefl.wire.blobs import describe
from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.bundle.manifest import decode_manifest
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt import messages
from edgefl.wire.mqtt.envelope import open_message, peek
from edgefl.wire.mqtt.messages import decode
from edgefl.wire.mqtt.topics import Topics
from tests.wire.mqtt.rounds import announcement

MOST_BYTES = 1 << 20
_BLOB_BYTES = 1 << 16
_WEIGHTS = {"body.weight": np.zeros((20, 30), np.float32), "body.bias": np.zeros(20, np.float32)}

KINDS: tuple[type[messages.Message], ...] = (
    *(messages.Round, messages.Status, messages.Hello, messages.Task, messages.Progress, messages.Update),
    *(messages.UpdateChunk, messages.Ack, messages.Decline),
    *(messages.ProfileOffer, messages.ProfileRequest, messages.ProfileAnswer),
)


SIGNED_KINDS = frozenset(KINDS) - {messages.Update, messages.ProfileOffer}


def any_message(data: bytes) -> None:
    for kind in KINDS:
        with suppress(EdgeflError):
            decode(kind, data)


def any_topic(data: bytes) -> None:
    topics = Topics("f")
    text = data.decode("utf-8", "replace")
    for topic in (
        text,
        f"{topics.root}/{text}",
        f"{topics.root}/devices/{text}",
        f"{topics.root}/blobs/{text}",
    ):
        for parse in (topics.parse_device, topics.parse_blob, topics.parse_offer):
            with suppress(EdgeflError):
                parse(topic)


def tensor_file(data: bytes) -> None:
    with suppress(EdgeflError):
        arrays = tensors.load(data, max_bits=MOST_BYTES)
        assert sum(array.nbytes for array in arrays.values()) <= len(data) + MOST_BYTES


def patch(data: bytes) -> None:
    with suppress(EdgeflError):
        new = patches.apply_patch(_WEIGHTS, data)
        assert {name: array.shape for name, array in new.items()} == {n: a.shape for n, a in _WEIGHTS.items()}


def compressed_blob(data: bytes) -> None:
    ref = describe(data, 1024, raw=_BLOB_BYTES)
    with suppress(EdgeflError):
        assert len(blobs.decompress(ref, data, _BLOB_BYTES)) <= _BLOB_BYTES
    with suppress(EdgeflError):
        assert len(blobs.decompress_against(b"base", data, _BLOB_BYTES)) <= _BLOB_BYTES


def manifest(data: bytes) -> None:
    with suppress(EdgeflError):
        decode_manifest(data)


def profile(data: bytes) -> None:
    with suppress(EdgeflError):
        profiles.decode(data)


def bundle_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.efl"
        path.write_bytes(data)
        with suppress(EdgeflError):
            read_bundle(path)


def envelope(data: bytes) -> None:
    """A message that is signed, or says so."""
    for kind in KINDS:
        with suppress(EdgeflError):
            peek(kind, data)
        if kind in SIGNED_KINDS:
            with suppress(EdgeflError):
                open_message(kind, "edgefl/v1/f/rounds/current", data)


def page(data: bytes) -> None:
    """Of an announcement, and what its references say of themselves."""
    head = announcement().paged(describe(data, 1024))
    with suppress(EdgeflError):
        whole = head.whole(data)
        for ref in (ref for line in whole.units.values() for ref in line):
            ref.check(_BLOB_BYTES)


def mirror(data: bytes) -> None:
    with suppress(EdgeflError):
        found = Mirror.parse(data.decode("utf-8", "replace"))
        assert found == Mirror.parse(str(found)) and found.target("x").isprintable()
        assert not set(found.target("x") + found.netloc) & set(" \r\n#?")


TARGETS: Mapping[str, tuple[Callable[[bytes], None], tuple[str, ...]]] = {
    "messages": (
        any_message,
        ("ack_*", "decline*", "hello*", "pro*", "round*", "status*", "task*", "update*"),
    ),
    "envelopes": (envelope, ("signed_*", "hello*", "round*")),
    "pages": (page, ("round_page*",)),
    "mirrors": (mirror, ("topics*",)),
    "topics": (any_topic, ("topics*",)),
    "tensors": (tensor_file, ("tensors*", "patch_*")),
    "patches": (patch, ("patch*",)),
    "zstd": (compressed_blob, ("zstd*",)),
    "manifests": (manifest, ("manifest*",)),
    "profiles": (profile, ("profile_*", "update*")),
    "bundles": (bundle_file, ("bundle*",)),
}
"""By name: the decoder, and the byte vectors that it reads when they are whole."""

"""Manifests that read well and make no sense, through a whole round of a device: declined by an error of ours, or run."""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgefl.errors import BundleError, EdgeflError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import decode_manifest
from edgefl_device.round.control import StepProgress
from tests.device_runtime import tiny
from tests.device_runtime.rounds import Device
from tests.device_runtime.tiny import World

TRIES = 120
_NUMBERS = (0, 1, 2, 3, 4, 5, 8, 100, 1 << 20, 1 << 40, -1)


class Published(World):
    """A world that lacks what nobody published, as a broker does."""

    def get(self, ref: BlobRef) -> bytes:
        if ref.sha256 not in self.blobs:
            raise BundleError(f"blob {ref.sha256[:12]} is not there")
        return super().get(ref)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in nested maps and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inside for place in places(each, (*path, key)))]


def at(fields: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        fields = fields[key]
    return fields


def changed(rng: random.Random, fields: Any) -> Any:
    """The manifest with one or two things replaced by others of it of the same kind, a number also by another number."""
    fields = copy.deepcopy(fields)
    for _ in range(rng.randint(1, 2)):
        paths = [place for place in places(fields) if place]
        path = rng.choice(paths)
        old = at(fields, path)
        alike = [each for place in paths if type(each := at(fields, place)) is type(old)]
        new = rng.choice(_NUMBERS if type(old) is int and rng.random() < 0.7 else alike)
        at(fields, path[:-1])[path[-1]] = copy.deepcopy(new)
    return fields


@pytest.mark.sample(1)
@pytest.mark.parametrize("codec", ["dense", "fedbat"])
def test_no_manifest_that_reads_well_raises_anything_but_errors_of_ours(codec: str) -> None:
    rng, bundle = random.Random(11), tiny.make_bundle(codec=codec)
    fields = msgspec.msgpack.decode(bundle.encoded)
    outcomes = {"unread": 0, "refused": 0, "ran": 0}
    for _ in range(TRIES):
        try:
            manifest = decode_manifest(msgspec.msgpack.encode(changed(rng, fields)))
        except EdgeflError:
            outcomes["unread"] += 1
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcomes[_outcome(Device(Path(folder), Published(BundleArchive(manifest, bundle.blobs))))] += 1

    assert outcomes["refused"] > 2 and outcomes["ran"] > 2, outcomes


def _outcome(device: Device) -> str:
    """A round that would go on for ever ends as it does when the server closes it."""
    steps = 0

    def watch(_: StepProgress) -> None:
        nonlocal steps
        steps += 1
        if steps > 100:
            device.control.cancel()

    try:
        job = device.world.job()
        device.run(job, watch=watch)
    except EdgeflError:
        return "refused"
    finally:
        device.store.close()
    return "ran"

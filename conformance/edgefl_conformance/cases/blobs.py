"""Blobs: chunk by chunk, compressed, patched, damaged, late, and from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np
from safetensors.numpy import save

from edgefl.wire import patches, tensors
from edgefl.wire.blobs import BlobRef, compress, describe, split
from edgefl.wire.mqtt.messages import Round
from edgefl.wire.tensors import Arrays
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.material.bundles import Material, unit_bytes
from edgefl_conformance.play.harness import RoundHarness
from edgefl_conformance.results import expect

BLOBS = CaseGroup("blobs")
_SMALL = 700
_SCALES = "/scales"


@BLOBS.case("Fetches blobs of many chunks, each of which it asks for at QoS 0.")
def many_chunks(harness: RoundHarness) -> None:
    begun = time.monotonic()
    harness.good_round(harness.material("coded"), chunk=_SMALL)
    if not harness.relay.reads:
        return
    asked = harness.relay.subscriptions(begun)
    wrong = [each.topic for each in asked if "/blobs/" in each.topic and each.qos != 0]
    expect(not wrong, "chunks asked for at QoS 0", f"another for {len(wrong)}")


@BLOBS.case("Unfolds blobs that travel compressed (zstd).")
def zstd(harness: RoundHarness) -> None:
    harness.good_round(harness.material("onebit"), zstd=True, chunk=4096)


@BLOBS.case("Puts weights together from a blob and the patches to it, rounding as docs/protocol.md says.")
def patched_weights(harness: RoundHarness) -> None:
    what = harness.material()
    unit = what.manifest.suffix[0]
    old = what.units[unit]
    first = {name: (array + np.float32(0.013)).astype(np.float32) for name, array in old.items()}
    one = patches.make_patch(old, first, set(old)) or b""
    middle = patches.apply_patch(old, one)
    second = {name: (array * np.float32(1.21)).astype(np.float32) for name, array in middle.items()}
    two = patches.make_patch(middle, second, {min(old)}) or b""
    new = patches.apply_patch(middle, two)
    after = what.with_units({**what.units, unit: new})

    def with_patches(announced: Round) -> Round:
        return with_line(announced, unit, tuple(map(harness.server.put, (unit_bytes(old), one, two))))

    harness.good_round(after, change=with_patches)


@BLOBS.case(
    "Refuses patches that do not fit: a name or a shape that is not there, too few scales, a scale that is no number."
)
def wrong_patches(harness: RoundHarness) -> None:
    what = harness.material()
    unit = what.manifest.suffix[0]
    name, array = max(what.units[unit].items(), key=lambda item: item[1].size)
    codes, scale = np.zeros(array.shape, np.int8), np.ones(1, np.float32)
    wrong_ones: tuple[Arrays, ...] = (
        {"nowhere.weight": np.zeros(3, np.float32)},
        {name: np.zeros((*array.shape, 2), np.int8), _SCALES: scale},
        {name: codes, _SCALES: scale[:0]},
        {name: codes, _SCALES: scale * np.float32("nan")},
    )
    for wrong in wrong_ones:
        patch = harness.server.put(tensors.dump(wrong))
        line = (*harness.line(what, unit), patch)
        play = harness.open(change=partial(with_line, unit=unit, line=line))
        harness.quiet(play.mark, "no update by a patch that does not fit", play.task)
    harness.good_round()


@BLOBS.case("Refuses weights with a name that is kept for masks and reads as none.")
def reserved_name(harness: RoundHarness) -> None:
    what = harness.material()
    unit = what.manifest.suffix[0]
    data = save({**what.units[unit], "mask~gaps:many": np.zeros(1, np.uint8)})
    _refused(harness, lambda announced: with_line(announced, unit, (harness.server.put(data),)))


@BLOBS.case("Makes float32 of weights that travel as float16.")
def half_weights(harness: RoundHarness) -> None:
    what = harness.material()
    half = {name: {k: a.astype(np.float16) for k, a in part.items()} for name, part in what.units.items()}
    whole = {name: {k: a.astype(np.float32) for k, a in part.items()} for name, part in half.items()}

    def halved(announced: Round) -> Round:
        units = {name: (harness.server.put(tensors.dump(part)),) for name, part in half.items()}
        return msgspec.structs.replace(announced, units=units)

    harness.good_round(what.with_units(whole), change=halved)


@BLOBS.case(
    "Takes no chunk whose digest is not the one that is listed, and asks for it again until it is right."
)
def damaged_chunk(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "damaged")
    data, ref, unit = _first_unit(what)
    _damaged(harness, what, unit, ref, damaged(data), data)


@BLOBS.case("Takes no blob whose chunks are as listed, and whose whole has another digest.")
def damaged_blob(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "other")
    data, _, unit = _first_unit(what)
    wrong = damaged(data)
    lying = msgspec.structs.replace(describe(wrong, _SMALL), sha256=describe(data, _SMALL).sha256)
    _refused(harness, lambda announced: _published(harness, announced, unit, lying, wrong), what)


@BLOBS.case("Takes no frame that unfolds to another size than its reference says.")
def lying_frame(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "frame")
    data, _, unit = _first_unit(what)
    ref, frame = compress(data + b" " * 4096, _SMALL)
    lying = msgspec.structs.replace(ref, raw=len(data))
    _refused(harness, lambda announced: _published(harness, announced, unit, lying, frame), what)


@BLOBS.case(
    "Refuses references that contradict themselves: no chunk size, digests that do not fit, no hexadecimal digest."
)
def wrong_references(harness: RoundHarness) -> None:
    what = harness.material()
    unit = what.manifest.suffix[0]
    data, ref, _ = _first_unit(what)
    for wrong in (
        msgspec.structs.replace(ref, digests=ref.digests[:-32]),
        msgspec.structs.replace(ref, sha256=ref.sha256.upper()),
        msgspec.structs.replace(ref, size=len(data) + (1 << 45)),
    ):
        play = harness.open(change=partial(with_line, unit=unit, line=(wrong,)))
        harness.quiet(play.mark, "no update by a reference that contradicts itself", play.task)
    harness.good_round()


@BLOBS.case("Waits for a chunk that the broker does not have yet, and continues when it arrives.")
def late_chunk(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "late")
    data, ref, unit = _first_unit(what)
    harness.ensure()
    offer, units = harness.offer(what)
    pieces = list(split(data, _SMALL))
    harness.server.put_chunks(ref, pieces[:-1])
    announced = harness.announcement(offer, {**units, unit: (ref,)})
    play = harness.give(announced, harness.task(announced, what), what)
    time.sleep(harness.patient(1.0))
    harness.server.publish(
        harness.server.topics.blob_chunk(ref.sha256, len(pieces) - 1), pieces[-1], retain=True
    )
    harness.settle(play)


@BLOBS.case("Leaves a round that closes while it fetches, and takes the next one.")
def round_closes_while_fetching(harness: RoundHarness) -> None:
    what = fresh(harness.material(), "never")
    _, ref, unit = _first_unit(what)
    play = harness.open(change=lambda announced: with_line(announced, unit, (ref,)))
    time.sleep(harness.patient(0.5))
    harness.close(play)
    harness.good_round()


def fresh(what: Material, word: str) -> Material:
    """Return the material with weights that no blob in an agent's store holds."""
    shift = np.float32(0.001 * (1 + len(word)) + sum(word.encode()) * 1e-6)
    return what.with_units(
        {name: {k: a + shift for k, a in part.items()} for name, part in what.units.items()}
    )


def damaged(data: bytes) -> bytes:
    """Return ``data`` with one bit changed."""
    wrong = bytearray(data)
    wrong[-2] ^= 1
    return bytes(wrong)


def _first_unit(what: Material) -> tuple[bytes, BlobRef, str]:
    unit = what.manifest.suffix[0]
    data = unit_bytes(what.units[unit])
    return data, describe(data, _SMALL), unit


def with_line(announced: Round, unit: str, line: tuple[BlobRef, ...]) -> Round:
    return msgspec.structs.replace(announced, units={**announced.units, unit: line})


def _published(harness: RoundHarness, announced: Round, unit: str, ref: BlobRef, data: bytes) -> Round:
    harness.server.put_chunks(ref, list(split(data, ref.chunk)))
    return with_line(announced, unit, (ref,))


def _damaged(
    harness: RoundHarness, what: Material, unit: str, ref: BlobRef, wrong: bytes, right: bytes
) -> None:
    harness.ensure()
    offer, units = harness.offer(what)
    for index in range(ref.count):
        harness.server.clear(harness.server.topics.blob_chunk(units[unit][0].sha256, index))
    harness.server.put_chunks(ref, list(split(wrong, ref.chunk)))
    announced = harness.announcement(offer, {**units, unit: (ref,)})
    play = harness.give(announced, harness.task(announced, what), what)
    harness.quiet(play.mark, "no update by a chunk whose digest is wrong", play.task)
    harness.server.put_chunks(ref, list(split(right, ref.chunk)))
    harness.settle(play)


def _refused(harness: RoundHarness, change: Callable[[Round], Round], what: Material | None = None) -> None:
    harness.ensure()
    play = harness.open(what, change=change)
    harness.quiet(play.mark, "no update by a blob that has to be refused", play.task)
    harness.good_round()

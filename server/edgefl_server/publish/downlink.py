"""Encoder of the model for devices: complete in float32 or float16, or as int8 changes with error feedback.

With int8 there are two versions of the model: w, the exact one of the server, and r, the one that devices
reconstruct. A *keyframe* is w in float32. After it there is one patch per round and unit
(:mod:`edgefl.wire.patches`), made from w - r, so the rounding error of one patch is part of the next. A device of the
last round fetches one patch; a new device fetches the keyframe and all patches since. A tier's own payload is handled
like a unit while it holds the same entries. If these change, or masks name them, it is sent complete, in float16.

Devices train from r, while placements are chosen by w. Both kinds of updates work with that. Changes are added to w,
so w keeps what r lacks. Dense weights are averaged, and the mean replaces r, including its error. The change in a
dense update must be measured from r (:meth:`Downlink.received`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from edgefl.errors import ConfigError
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, decompress
from edgefl.wire.patches import apply_patch, make_patch, to_float16, to_float32
from edgefl.wire.regions import EntryRegion, Placement, Positions, Region, spans
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import Form
from edgefl_server.run_spec import Count, DownlinkSpec, Encoding
from edgefl_server.storage.checkpoints import Lines, PublishedModel, PublishedModels


class BlobPublisher(Protocol):
    """Interface of the blob publisher (:class:`edgefl_server.publish.publisher.Publisher`)."""

    def offer(self, data: bytes, chunk: int = 0, *, plain: bool = False) -> BlobRef:
        """Publish a blob of these bytes and return its reference.

        ``chunk`` is the size of a chunk in bytes; 0 is the default. ``plain``: do not compress it.
        """

    def put(self, ref: BlobRef, data: bytes) -> BlobRef:
        """Publish a blob that is encoded already, and return its reference."""

    def encoded(self, sha256: str) -> bytes:
        """Return the encoded bytes of a published blob."""


@dataclass(frozen=True)
class PublishedPart:
    """Arrays published under one name: a unit (stage) of the model, or the payload of a tier.

    Attributes:
        arrays: Arrays by name.
        coded: Names of the arrays that may be rounded.
        masks: Number of bits of each array that holds packed bits.
        regions: Positions of a payload's arrays in the global model; None for a unit.
    """

    arrays: Mapping[str, Array]
    coded: frozenset[str]
    masks: Mapping[str, int] = field(default_factory=dict)
    regions: Mapping[str, Region] | None = None

    @classmethod
    def of_payload(cls, placement: Placement, trained: frozenset[str]) -> PublishedPart:
        """Return the published part for the payload in a tier's ``placement``.

        An array may be rounded if it holds only entries of parameters that are ``trained``.
        """
        coded = {
            name
            for name, region in placement.regions.items()
            if trained.issuperset(region.names if isinstance(region, EntryRegion) else (name,))
        }
        always = placement.payload.keys() & trained  # sent down, and not up
        return cls(placement.payload, frozenset(coded | always), placement.masks, placement.regions)


@dataclass(frozen=True)
class _PatchChain:
    """Complete blob of a part, and the patches (differences to the next model) that follow it.

    Attributes:
        since: Number of the model that the complete blob holds.
        refs: The complete blob, then its patches in order.
        r: Arrays that a device has after it applied all patches.
        regions: Positions of a payload's arrays in the global model; None for a unit.
    """

    since: int
    refs: tuple[BlobRef, ...]
    r: Arrays
    regions: Mapping[str, Region] | None


class Downlink:
    """Encoder and publisher of successive models for devices. The same models in the same order give the same bytes.

    Args:
        spec: Options of the downlink, such as its encoding.
        publisher: Publisher of the blobs.
        published: Records of published models, which are used with int8.
        blob_limit: Largest decoded blob in bytes.
    """

    def __init__(
        self, spec: DownlinkSpec, publisher: BlobPublisher, published: PublishedModels, blob_limit: int
    ) -> None:
        self._spec = spec
        self._publisher = publisher
        self._published = published
        self._limit = blob_limit
        self._lines: dict[str, _PatchChain] = {}

    @property
    def units(self) -> dict[str, tuple[BlobRef, ...]]:
        """Return the blobs of each published part: the complete one, then its patches in order."""
        return {name: line.refs for name, line in self._lines.items()}

    def publish(self, number: int, model: str, parts: Mapping[str, PublishedPart]) -> None:
        """Publish the parts of a model. With int8 a record of them is on disk before this method returns.

        Args:
            number: Number of the round after which the model exists; 0 for the initial model.
            model: Version of the model.
            parts: Parts by published name.

        Raises:
            StoreError: If the parts cannot be written. The parts of the previous model then stay published.
        """
        before, after = self._lines, {name: self._next(number, name, part) for name, part in parts.items()}
        if self._spec.encoding == "int8":
            lines: Lines = {name: line.refs for name, line in after.items()}
            fresh = {
                ref.sha256
                for name, line in after.items()
                for ref in line.refs[0 if line.since == number else len(before[name].refs) :]
            }
            blobs = {name: self._publisher.encoded(name) for name in sorted(fresh)}
            record = PublishedModel(
                run=self._published.run, model=model, oldest=_oldest(after, number), lines=lines, blobs=blobs
            )
            self._published.save(number, record)
            # The model before must stay: its round is not journaled as ended yet.
            self._published.prune(_oldest(before, number), number)
        self._lines = after  # last: a full disk leaves it as it was, for another try

    def resume(self, number: int, model: str, parts: Mapping[str, PublishedPart]) -> None:
        """Publish the model again with the same bytes as the previous server process.

        With int8, if the record of those bytes is missing or differs, the parts are published complete.

        Args:
            number: Number of the round after which the model exists; 0 for the initial model.
            model: Version of the model.
            parts: Parts by published name.

        Raises:
            StoreError: If the parts cannot be written.
        """
        known = self._published.load(number, model) if self._spec.encoding == "int8" else None
        if known is None or known[0].lines.keys() != parts.keys():
            self.publish(number, model, parts)
            return
        record, blobs = known
        for name, refs in record.lines.items():
            data = [decompress(ref, blobs[ref.sha256], self._limit) for ref in refs]
            r = to_float32(tensors.load(data[0]))
            for changes in data[1:]:
                r = apply_patch(r, changes)
            for ref in refs:
                self._publisher.put(ref, blobs[ref.sha256])
            self._lines[name] = _PatchChain(record.oldest, refs, r, parts[name].regions)

    def received(self, weights: Mapping[str, Array], parts: Mapping[str, PublishedPart]) -> Arrays:
        """Return the model as devices receive it: ``weights`` with the rounding of the published ``parts``.

        With int8 the parts must be those of the last :meth:`publish`. A part is a whole unit (stage of the model) or a
        submodel's payload. Where both hold an entry, the unit's value counts.

        Args:
            weights: Model before rounding, by global name.
            parts: Published parts, by the name under which they were published.
        """
        if self._spec.encoding == "float32":
            return dict(weights)
        rounded_weights = {name: array.copy() for name, array in weights.items()}
        shapes = {name: array.shape for name, array in weights.items()}
        for name, part in sorted(parts.items(), key=lambda item: item[1].regions is None):
            r = self._lines[name].r or to_float32(to_float16(part.arrays, part.coded))
            regions = dict.fromkeys(r) if part.regions is None else part.regions
            for local in regions.keys() & r.keys():
                _scatter(r[local].reshape(-1), spans(local, regions[local], shapes), rounded_weights)
        return rounded_weights

    def _next(self, number: int, name: str, part: PublishedPart) -> _PatchChain:
        """Publish the blobs of part ``name`` for the next model and return them: a new complete blob, or the earlier
        blobs and one more patch.

        :attr:`units` does not change.
        """
        before, encoding = self._lines.get(name), self._spec.encoding
        moved = before is not None and part.regions != before.regions
        keyframe = before is None or number % self._spec.keyframe_every == 0
        if encoding == "float16" or (encoding == "int8" and (moved or part.masks)):
            return self._whole(number, part, to_float16(part.arrays, part.coded))
        if before is None or encoding == "float32" or keyframe:
            return self._whole(number, part, part.arrays)
        changes = make_patch(before.r, part.arrays, part.coded)
        if changes is None:
            return before
        refs = (*before.refs, self._publisher.offer(changes))
        return replace(before, refs=refs, r=apply_patch(before.r, changes))

    def _whole(self, number: int, part: PublishedPart, arrays: Mapping[str, Array]) -> _PatchChain:
        ref = self._publisher.offer(tensors.dump(arrays, part.masks))
        r = to_float32(arrays) if self._spec.encoding == "int8" and not part.masks else {}
        return _PatchChain(number, (ref,), r, part.regions)


def _oldest(lines: Mapping[str, _PatchChain], number: int) -> int:
    return min((line.since for line in lines.values()), default=number)


def check_counting(count: Count, encoding: Encoding, forms: Mapping[str, Form], own: Collection[str]) -> None:
    """Check that the server can determine which entries of an update a device changed.

    The server cannot if ``round.count`` is nonzero, updates are dense, the encoding is int8, and some of several tiers
    have own payloads. Each payload is then rounded with steps of its own.

    Args:
        count: Option ``round.count``.
        encoding: Encoding of the downlink.
        forms: Form of the updates, by tier.
        own: Tiers with a payload.

    Raises:
        ConfigError: For this combination of options.
    """
    dense = any(not form.change for form in forms.values())
    if count == "nonzero" and dense and encoding == "int8" and own and len(forms) > 1:
        raise ConfigError(
            "round.count 'nonzero' finds out what a device changed by comparing its weights with those it was given, and "
            "downlink.encoding 'int8' rounds each tier's own part by itself: choose 'float16' or 'float32', round.count "
            "'holders', or a codec that sends changes",
            encoding=encoding,
        )


def _scatter(values: Array, parts: Iterable[tuple[str, slice, Positions | None]], into: Arrays) -> None:
    """Copy the entries of a flat local tensor to their positions in the global tensors ``into``."""
    for name, where, positions in parts:
        into[name].reshape(-1)[slice(None) if positions is None else positions] = values[where]

"""What devices are given of the model: whole in float32 or float16, or as changes in int8 with the error fed back.

With int8 the model has two versions: w, the server's own, exact, and r, the one that devices put together. A *keyframe*
is w in float32; from one to the next there is one patch per round and unit (:mod:`edgefl.wire.patches`), made from
w - r, so what one patch rounds off is in the next. A device that took part in the last round fetches a patch, one that
comes fresh the keyframe and all patches since. A tier's own payload goes like a unit while it holds the same entries;
when these change, and where they are told by masks, it is sent whole, in float16.

Devices train from r, placements are chosen by w. Both uplinks are fine with that: changes are added to w, so w keeps
what r has not got yet; dense weights are averaged, and the mean stands where r stood, with its error and all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgefl.submodels.submodel import Entries, Placement, Region
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.compression import unpacked
from edgefl.wire.patches import halved, patch, patched, widened
from edgefl.wire.tensors import Array, Arrays
from server.plan import DownlinkPlan
from server.publisher import Publisher
from server.shelf import Lines, Record, Shelf, new_blobs


@dataclass(frozen=True)
class Part:
    """What is published under one name: a unit of the model (``regions`` is None), or a tier's own payload.

    ``coded`` names the arrays that may be rounded, ``masks`` those that are packed bits.
    """

    arrays: Mapping[str, Array]
    coded: frozenset[str]
    masks: Mapping[str, int] = field(default_factory=dict)
    regions: Mapping[str, Region] | None = None

    @classmethod
    def of_payload(cls, placement: Placement, trained: frozenset[str]) -> Part:
        """A tier's payload: rounded where it holds nothing but entries of the parameters ``trained``."""
        coded = {
            name
            for name, region in placement.regions.items()
            if trained.issuperset(region.names if isinstance(region, Entries) else (name,))
        }
        always = placement.payload.keys() & trained  # sent down, and not up
        return cls(placement.payload, frozenset(coded | always), placement.masks, placement.regions)


@dataclass(frozen=True)
class _Line:
    """A whole blob and the patches since; ``since`` numbers the model of the whole one, ``r`` is what they come to."""

    since: int
    refs: tuple[BlobRef, ...]
    r: Arrays
    regions: Mapping[str, Region] | None


class Downlink:
    """Publishes the parts of one model after the other. The same models in the same order give the same bytes."""

    def __init__(self, plan: DownlinkPlan, publisher: Publisher, shelf: Shelf, blob_limit: int) -> None:
        self._plan = plan
        self._publisher = publisher
        self._shelf = shelf
        self._limit = blob_limit
        self._lines: dict[str, _Line] = {}

    @property
    def units(self) -> dict[str, BlobRef]:
        """The whole blob of each part."""
        return {name: line.refs[0] for name, line in self._lines.items()}

    @property
    def patches(self) -> dict[str, tuple[BlobRef, ...]]:
        """The patches of each part that has any, in order."""
        return {name: line.refs[1:] for name, line in self._lines.items() if line.refs[1:]}

    def publish(self, number: int, parts: Mapping[str, Part]) -> None:
        """Offer the model after round ``number``. With int8 it is on disk before this returns."""
        before = {name: line.refs for name, line in self._lines.items()}
        needed = self._oldest(number)
        self._lines = {name: self._next(number, name, part) for name, part in parts.items()}
        if self._plan.encoding == "int8":
            lines: Lines = {name: line.refs for name, line in self._lines.items()}
            blobs = {name: self._publisher.travelling(name) for name in sorted(new_blobs(lines, before))}
            self._shelf.save(number, Record(oldest=self._oldest(number), lines=lines, blobs=blobs))
            self._shelf.prune(needed)  # the model before must stay: its round is not journaled as ended yet

    def resume(self, number: int, parts: Mapping[str, Part]) -> None:
        """Offer the model after round ``number`` again as a killed process did; as keyframes if that is not known."""
        known = self._shelf.load(number) if self._plan.encoding == "int8" else None
        if known is None or known[0].lines.keys() != parts.keys():
            self.publish(number, parts)
            return
        record, blobs = known
        for name, refs in record.lines.items():
            data = [unpacked(ref, blobs[ref.sha256], self._limit) for ref in refs]
            r = widened(tensors.load(data[0]))
            for changes in data[1:]:
                r = patched(r, changes)
            for ref in refs:
                self._publisher.put(ref, blobs[ref.sha256])
            self._lines[name] = _Line(record.oldest, refs, r, parts[name].regions)

    def _oldest(self, number: int) -> int:
        return min((line.since for line in self._lines.values()), default=number)

    def _next(self, number: int, name: str, part: Part) -> _Line:
        """The part whole, or one patch more."""
        before, encoding = self._lines.get(name), self._plan.encoding
        moved = before is not None and part.regions != before.regions
        keyframe = before is None or number % self._plan.keyframe_every == 0
        if encoding == "float16" or (encoding == "int8" and (moved or part.masks)):
            return self._whole(number, part, halved(part.arrays, part.coded))
        if before is None or encoding == "float32" or keyframe:
            return self._whole(number, part, part.arrays)
        changes = patch(before.r, part.arrays, part.coded)
        if changes is None:
            return before
        refs = (*before.refs, self._publisher.offer(changes))
        return replace(before, refs=refs, r=patched(before.r, changes))

    def _whole(self, number: int, part: Part, arrays: Mapping[str, Array]) -> _Line:
        ref = self._publisher.offer(tensors.dump(arrays, part.masks))
        r = widened(arrays) if self._plan.encoding == "int8" and not part.masks else {}
        return _Line(number, (ref,), r, part.regions)

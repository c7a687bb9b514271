"""Storage of accepted updates' bytes, in files or in objects elsewhere; the journal holds their locations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class UpdateLocation:
    """Location of an update's bytes: file (or object) name, offset and size."""

    file: str
    offset: int
    size: int


class UpdateStore(Protocol):
    """Bytes of the updates of open rounds. Several processes may add to one; each of them gives what it writes a name of
    its own."""

    def append(self, number: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
        """Add updates of round ``number``, all durable before this returns; StoreError if they are not.

        If the process is killed before the journal names the bytes, they are never read.
        """

    def read(self, place: UpdateLocation) -> bytes:
        """The bytes that lie there; StoreError if they are not all there."""

    def drop(self) -> None:
        """Delete the updates of all rounds, whoever wrote them. What cannot be deleted stays until the next time."""


def places_of(file: str, begin: int, updates: Sequence[bytes]) -> list[UpdateLocation]:
    """Return the locations of updates that lie one after the other, the first at ``begin``."""
    places = []
    for data in updates:
        places.append(UpdateLocation(file, begin, len(data)))
        begin += len(data)
    return places

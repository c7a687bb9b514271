"""Where the bytes of accepted updates lie, beside the journal that says where: files here, or objects elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of an update lie: in which file (or object), and where in it."""

    file: str
    offset: int
    size: int


class UpdateStore(Protocol):
    """Bytes of the updates of open rounds. Several processes may add to one; each of them gives what it writes a name of
    its own."""

    def append(self, number: int, updates: Sequence[bytes]) -> list[Place]:
        """Add updates of round ``number``, all durable before this returns; StoreError if they are not.

        What a journal never came to name, of a process that was killed, is read by nobody.
        """

    def read(self, place: Place) -> bytes:
        """The bytes that lie there; StoreError if they are not all there."""

    def drop(self) -> None:
        """Delete the updates of all rounds, whoever wrote them. What cannot be deleted stays until the next time."""


def places_of(file: str, begin: int, updates: Sequence[bytes]) -> list[Place]:
    """Of updates that lie one after the other, the first at ``begin``."""
    places = []
    for data in updates:
        places.append(Place(file, begin, len(data)))
        begin += len(data)
    return places

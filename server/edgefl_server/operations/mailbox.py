"""Orders of an operator to a server, as files in ``orders`` of the run's folder: written whole, read now and then, and gone
once they are carried out or refused. Whoever may write there may give orders; the fleet's page asks for a token first."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from edgefl.system.files import make_folder, write_whole

FOLDER = "orders"
_PAUSED = "paused"
_MOST_BYTES = 4096


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", tag=str.lower):
    """Base of all orders. ``by`` is where it came from, ``at`` when, in epoch seconds."""

    by: str = ""
    at: float = 0.0

    @property
    def name(self) -> str:
        return type(self).__name__.lower()


class Pause(Order, frozen=True, kw_only=True):
    """Let the open round end, and open no other."""


class Resume(Order, frozen=True, kw_only=True):
    """Order to resume after a pause."""


class Drain(Order, frozen=True, kw_only=True):
    """Order to close the open round and then stop the server. A restarted server resumes the run."""


class RollBack(Order, frozen=True, kw_only=True, tag="rollback"):
    """Once no round is open, make the model that after round ``version`` again; the rounds since count no more."""

    version: int

    @property
    def name(self) -> str:
        return "rollback"


AnyOrder = Pause | Resume | Drain | RollBack
_decode = msgspec.json.Decoder(AnyOrder).decode


def read(data: bytes) -> AnyOrder:
    """An order as JSON: ``{"order":"rollback","version":7}``. ValueError for anything else."""
    try:
        order: AnyOrder = _decode(data)
        return order
    except UnicodeDecodeError as error:
        raise ValueError("an order is JSON in UTF-8") from error


class Mailbox:
    """The orders in a run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def give(self, order: AnyOrder) -> None:
        """Leave an order for the server. OSError if it cannot be written."""
        make_folder(self._folder)
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
        write_whole(self._folder / name, msgspec.json.encode(order), durable=True)

    def waiting(self) -> Iterator[tuple[Path, AnyOrder | None]]:
        """Return the pending orders, the oldest first; None for an invalid one."""
        for path in sorted(self._folder.glob("*.json")):
            try:
                with path.open("rb") as file:
                    yield path, read(file.read(_MOST_BYTES))
            except ValueError:
                yield path, None
            except OSError:  # gone meanwhile
                continue

    def done(self, path: Path) -> None:
        """An order was carried out, or refused. One that cannot be deleted waits for the next server."""
        with suppress(OSError):
            path.unlink(missing_ok=True)

    @property
    def paused(self) -> bool:
        """Return True if the server is to open no round, even after a restart."""
        return (self._folder / _PAUSED).exists()

    def pause(self, *, on: bool) -> None:
        """Remember whether it is."""
        if on:
            make_folder(self._folder)
            write_whole(self._folder / _PAUSED, b"", durable=True)
        else:
            (self._folder / _PAUSED).unlink(missing_ok=True)

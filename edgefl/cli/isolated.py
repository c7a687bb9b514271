"""``edgefl device`` and ``edgefl server`` read their options in a process apart.

What reads a command line (typer, rich and, for a device, pydantic) takes 15 MB that nobody asks for again while a process
waits for its next round. So a child reads the options and ends, while this process loads what it needs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import msgspec

_Settings = TypeVar("_Settings", bound="msgspec.Struct")
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class Life(Generic[_Settings, _Loaded]):
    """What a process does once it knows its ``settings``; what it loads before, it is given."""

    settings: type[_Settings]
    load: Callable[[], _Loaded]
    run: Callable[[_Settings, _Loaded], None]

    def begin(self, settings: _Settings) -> None:
        """All of it here, where this process has read the options itself."""
        self.run(settings, self.load())


@dataclass(frozen=True)
class Told:
    """The way from the child that reads options to the process they are for; the command has it as its context's object."""

    descriptor: int

    def tell(self, settings: msgspec.Struct) -> None:
        import msgspec

        with os.fdopen(self.descriptor, "wb") as pipe:
            pipe.write(msgspec.json.encode(settings))


def run(command: Callable[..., None], life_of: Callable[[], Life[Any, Any]]) -> None:
    """Live the life that ``command`` tells of, called with a :class:`Told`. Where it tells of none, exit as it does."""
    # A child of a process with several threads may wait for ever for a lock that one of the others holds.
    if not hasattr(os, "fork") or threading.active_count() > 1:
        command()
        return
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        command(Told(write_end))
        return
    os.close(write_end)
    try:
        life = life_of()
        loaded = life.load()  # both are done at about the same time
    finally:
        with os.fdopen(read_end, "rb") as pipe:
            message = pipe.read()
        _, status = os.waitpid(child, 0)
    if not message:
        sys.exit(os.waitstatus_to_exitcode(status))
    import msgspec

    life.run(msgspec.json.decode(message, type=life.settings), loaded)

"""``edgefl device`` reads its options in a process apart.

What reads a command line (typer, rich, pydantic) takes 15 MB that nobody asks for again while a device waits for its next
round. So a child reads the options and ends, while this process loads what the device needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

    from edgefl.cli.device.process import DeviceSettings


@dataclass(frozen=True)
class Told:
    """The way from the child that reads options to the device. The command finds it as its context's object."""

    descriptor: int

    def tell(self, settings: DeviceSettings) -> None:
        import msgspec

        with os.fdopen(self.descriptor, "wb") as pipe:
            pipe.write(msgspec.json.encode(settings))


def run(command: Callable[[], typer.Typer]) -> None:
    """Be the device that ``command``'s arguments describe. Where they describe none, exit as ``command`` does."""
    if not hasattr(os, "fork"):
        command()()
        return
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        command()(obj=Told(write_end))
        return
    os.close(write_end)
    settings = _device_of(read_end)
    _, status = os.waitpid(child, 0)
    if settings is None:
        sys.exit(os.waitstatus_to_exitcode(status))
    from edgefl.cli.device import process

    process.run(settings)


def _device_of(read_end: int) -> DeviceSettings | None:
    """What the child tells, after this process has loaded the agent: both are done at about the same time."""
    import msgspec

    from edgefl.cli.device.process import DeviceSettings, load

    load()

    with os.fdopen(read_end, "rb") as pipe:
        message = pipe.read()
    return msgspec.json.decode(message, type=DeviceSettings) if message else None

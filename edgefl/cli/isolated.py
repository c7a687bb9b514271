"""Start of ``edgefl device`` and ``edgefl server``, whose options a child process reads.

Modules that read a command line (typer, rich, pydantic) take 15 MB, which an idle process would keep. A child reads
the options and ends, while this process loads its own modules.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import msgspec


class ProcessModule(Protocol):
    """Interface of a module with the code of a process, which runs with settings."""

    @property
    def settings_type(self) -> type[msgspec.Struct]: ...

    def load(self) -> Any:
        """Load everything that does not depend on the settings. Its result is an argument of ``run``."""

    def run(self, settings: Any, loaded: Any) -> None: ...


@dataclass(frozen=True)
class SettingsPipe:
    """Writing end of the pipe from the child that reads options to the process that uses them; the command's context
    object.
    """

    descriptor: int

    def send(self, settings: msgspec.Struct) -> None:
        import msgspec

        with os.fdopen(self.descriptor, "wb") as pipe:
            pipe.write(msgspec.json.encode(settings))


def run(command: Callable[..., None], module_name: str) -> None:
    """Read the options in a child process, then run a :class:`ProcessModule` in this one.

    If the child sends no settings, exit with its code.

    Args:
        command: reads the command line in the child; called with a :class:`SettingsPipe`.
        module_name: module that runs here.
    """
    # In a process with several threads, a fork may wait endlessly for a lock that another thread held.
    if not hasattr(os, "fork") or threading.active_count() > 1:
        command()
        return
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        command(SettingsPipe(write_end))
        return
    os.close(write_end)
    try:
        module: ProcessModule = import_module(module_name)
        loaded = module.load()  # both are done at about the same time
    finally:
        with os.fdopen(read_end, "rb") as pipe:
            message = pipe.read()
        _, status = os.waitpid(child, 0)
    if not message:
        sys.exit(os.waitstatus_to_exitcode(status))
    import msgspec

    module.run(msgspec.json.decode(message, type=module.settings_type), loaded)

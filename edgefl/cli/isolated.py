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
    """Interface of a module that runs a command's process. ``settings_type`` is the type of its settings."""

    @property
    def settings_type(self) -> type[msgspec.Struct]: ...

    def load(self) -> Any:
        """Load all code that does not depend on the settings. The result is passed to ``run`` as ``loaded``."""

    def run(self, settings: Any, loaded: Any) -> None: ...


@dataclass(frozen=True)
class SettingsPipe:
    """Writing end of the pipe from the child that reads options to its parent, which runs the command. It is the context
    object of the command line.
    """

    descriptor: int

    def send(self, settings: msgspec.Struct) -> None:
        import msgspec

        with os.fdopen(self.descriptor, "wb") as pipe:
            pipe.write(msgspec.json.encode(settings))


def run(command: Callable[..., None], module_name: str) -> None:
    """Read the options in a child process, then run a :class:`ProcessModule` with them in this one.

    If the child sends no settings, exit with its code, also if the module could not be loaded here. Where no process can
    be forked, ``command`` does both here.

    Args:
        command: function that reads the command line. The child calls it with a :class:`SettingsPipe`.
        module_name: name of the module that runs here.
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
        # The child has printed its error. An error of the import here usually has the same cause: it is not printed again.
        if not message:
            sys.exit(os.waitstatus_to_exitcode(status))
    import msgspec

    module.run(msgspec.json.decode(message, type=module.settings_type), loaded)

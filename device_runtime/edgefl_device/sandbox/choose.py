"""Opening an engine in a process of its own, by its name."""

from __future__ import annotations

from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.wire.limits import Limits
from edgefl_device.engine.select import ENGINES, MOST_THREADS
from edgefl_device.sandbox.engine import SandboxedEngine
from edgefl_device.sandbox.process import SandboxSettings


def open_sandboxed(
    name: str, threads: int, most_threads: int, *, pages: Path, memory_bytes: int, limits: Limits
) -> SandboxedEngine:
    """The engine ``name``; ConfigError as of :func:`edgefl_device.engine.select.open_engine`.

    ``pages`` is the one folder that its process writes in, ``memory_bytes`` what the device offers to training.
    """
    if name not in ENGINES or not 1 <= threads <= MOST_THREADS:
        raise ConfigError(
            f"an engine is one of {', '.join(ENGINES)} with 1 to {MOST_THREADS} threads, found {name!r} with {threads}"
        )
    return SandboxedEngine(
        SandboxSettings(
            engine=name,
            threads=threads,
            most_threads=most_threads,
            pages=pages,
            step_s=limits.max_step_s,
            memory_bytes=memory_bytes,
            file_bytes=limits.store_bytes,
            readable=_read_by(name),
        )
    )


def _read_by(name: str) -> tuple[str, ...]:
    """What an engine reads beside its package. It is made here: a confined process starts no compiler."""
    if name != "executorch":
        return ()
    from edgefl_device.engine.executorch.build import binding, find_wheel

    return (str(binding(find_wheel(), lambda _: None).parent),)

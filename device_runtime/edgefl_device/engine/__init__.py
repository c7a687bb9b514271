"""Engines, which run the graphs of a bundle: one module per runtime, imported when it is opened, as a device installs
one.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.errors import ConfigError
from edgefl.wire.bundle.formats import FORMATS

if TYPE_CHECKING:
    from edgefl_device.engine.base import Engine

ENGINES: tuple[str, ...] = FORMATS
"""Names of the engines; each runs the artifacts of the format of its name."""

MOST_THREADS = 1024
"""More is a slip of the hand, and ends the process of a runtime that cannot start them."""

OLDEST_GLIBC = (2, 28)
"""Oldest glibc for which both runtimes, numpy and cryptography publish wheels."""


def platform_problem() -> str:
    """Return why no runtime is published for this Linux, or "" if one is, or the system is another one."""
    if platform.system() != "Linux":
        return ""
    machine, bits = platform.machine(), 8 * struct.calcsize("P")
    library, release = platform.libc_ver()
    is_recent = library == "glibc" and tuple(map(int, release.split(".")[:2])) >= OLDEST_GLIBC
    if machine in ("x86_64", "aarch64") and bits == 64 and is_recent:
        return ""
    return (
        f"expected Linux with 64 bits on x86_64 or aarch64 and glibc {'.'.join(map(str, OLDEST_GLIBC))} or newer, found "
        f"{machine} with {bits} bits and {f'{library} {release}' if library else 'no glibc'}; onnxruntime and executorch "
        "publish no wheels for it, so install a system that has them"
    )


def open_engine(name: str, threads: int = 1, pages: Path | None = None, most_threads: int = 0) -> Engine:
    """Return the engine ``name``, ready to load graphs.

    Args:
        name: ``onnx`` or ``executorch``.
        threads: Number of threads that runs a graph.
        pages: Folder for values between the segments of a graph (artifacts that run one after another). None: the
            system's folder for temporary files.
        most_threads: Largest number of threads that :meth:`Engine.load` accepts, for engines that choose it per graph;
            0: ``threads``.

    Raises:
        ConfigError: There is no such engine, its package is not installed, or ``threads`` is out of range.
    """
    if not 1 <= threads <= MOST_THREADS:
        raise ConfigError(
            f"an engine cannot work with {threads} threads: choose 1 to {MOST_THREADS} by `threads`",
            threads=threads,
        )
    if name == "onnx":
        try:
            from edgefl_device.engine.onnx import OnnxEngine
        except ImportError as error:
            remedy = (
                platform_problem() or "install it by `pip install onnxruntime`, or use `engine` executorch"
            )
            raise ConfigError(
                f"this engine needs the package onnxruntime, which cannot be used here ({error}): {remedy}",
                package="onnxruntime",
            ) from error
        return OnnxEngine(threads, pages, most_threads)
    if name == "executorch":
        from edgefl_device.engine.executorch import ExecuTorchEngine

        return ExecuTorchEngine(threads)
    raise ConfigError(f"there is no engine {name!r}: use one of {', '.join(ENGINES)}", engine=name)

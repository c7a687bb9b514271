"""Facts about this device: its memory and processor, and the installed agent."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path

from edgefl.system.distribution import version
from edgefl_device.memory import resident_bytes


def physical_memory() -> int:
    """Return the bytes of memory that the machine has; those of this process if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return resident_bytes()


_CPU_INFO = Path("/proc/cpuinfo")
_TOLD = ("model name", "flags", "Features", "CPU implementer", "CPU part")


@functools.cache
def processor() -> str:
    """Return the facts that decide which kernels are fast: the processor's name, and a digest of its features if they
    are known."""
    told = _facts()
    known = [told[name] for name in _TOLD if name in told]
    name = told.get("model name") or platform.processor() or platform.machine()
    return f"{name} {hashlib.sha256(repr(known).encode()).hexdigest()[:12]}" if known else name


@functools.cache
def processor_features() -> frozenset[str]:
    """Return the instruction sets of the processor by Linux's names, such as ``avx2``; empty where the system names none."""
    facts = _facts()
    return frozenset((facts.get("flags") or facts.get("Features") or "").split())


def _facts() -> dict[str, str]:
    """Return what the system writes of a processor, by name."""
    try:
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def agent_version() -> str:
    """Return ``edgefl/`` and its version, as a device names itself to the server."""
    return f"edgefl/{version()}"

"""Mosquitto as a child process, which starts again if its memory is full.

At its ``memory_limit`` Mosquitto refuses every message and every client, also the server that would erase what fills it, and
stays like that. It has nothing on the disk, so a new process begins empty: the server and the devices connect again and
publish what they had retained there.
"""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgefl.system.processes import child_process
from server.broker import message_bytes

_LOOK_S = 0.5
_FULL = 0.9
"""Part of the limit from which on messages may not fit any more."""
_PR_SET_PDEATHSIG = 1


def run_mosquitto(command: Sequence[str], memory_bytes: int = 0) -> int:
    """Run Mosquitto until it ends by itself, and return its exit code. SIGTERM and SIGINT end both.

    Args:
        command: As :func:`server.broker.mosquitto_command` returns it.
        memory_bytes: The same as in its configuration, 0 for a quarter of the machine's memory.
    """
    most = message_bytes(memory_bytes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    end_with_us = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: 0
    while True:
        with child_process(
            command, preexec_fn=lambda: end_with_us(_PR_SET_PDEATHSIG, signal.SIGTERM)
        ) as process:
            while _heap_bytes(process.pid) < _FULL * most:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(_LOOK_S)
        print(
            f"the broker's memory is full of messages ({most >> 20} MiB): it starts again without them. If that repeats, "
            "find the client that leaves retained messages, or raise --memory",
            file=sys.stderr,
            flush=True,
        )


def _heap_bytes(pid: int) -> int:
    """Return the memory that a process has written to, or 0 on systems that do not say (Linux does)."""
    with suppress(OSError):
        if found := re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return int(found[1]) << 10
    return 0

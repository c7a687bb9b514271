"""Software of other projects to compare with, each in its own environment: its requirements would constrain ours.

::

    make(PEERS["flower"])                       # once: an environment in the user's cache folder
    python = interpreter(PEERS["flower"])       # its Python, None before that
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edgefl.data.datasets import download_folder
from edgefl.errors import EdgeflError
from edgefl.system.processes import last_line

_COMPLETE = ".complete"


@dataclass(frozen=True)
class Peer:
    """Another project's software. ``needed_by``: the benchmark; ``requirements``: what pip installs."""

    name: str
    needed_by: str
    requirements: tuple[str, ...]


def _torch() -> str:
    """The release that we have: a peer is measured with the same."""
    return f"torch=={version('torch').partition('+')[0]}"


def peers() -> dict[str, Peer]:
    """All of them by name; PackageNotFoundError without torch."""
    return {
        peer.name: peer
        for peer in (
            Peer("flower", "python -m benchmarks aggregate", ("flwr>=1.15",)),
            Peer("flower-torch", "python -m benchmarks footprint", ("flwr>=1.15", _torch())),
            Peer(
                "ort-training",
                "python -m benchmarks train-step",
                ("onnxruntime-training==1.19.2", "onnx==1.16.2", _torch()),
            ),
            Peer("pfl", "python -m benchmarks simulate", ("pfl[pytorch]==0.6.*", _torch())),
            Peer("flower-simulation", "python -m benchmarks simulate", ("flwr[simulation]>=1.20", _torch())),
            Peer("jax", "python -m benchmarks train-step", ("jax>=0.5",)),
            Peer("onnxsim", "python -m benchmarks train-step", ("onnxsim==0.8.1", "onnxruntime")),
        )
    }


def folder(peer: Peer) -> Path:
    """Return the folder of its environment, which differs by requirements and by Python version."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join((python, *peer.requirements)).encode()).hexdigest()
    return download_folder() / "peers" / f"{peer.name}-{digest[:8]}"


def interpreter(peer: Peer) -> str | None:
    """The Python of its environment; None if there is none, or half of one."""
    home = folder(peer)
    return str(home / "bin" / "python") if (home / _COMPLETE).exists() else None


def make(peer: Peer, say: Callable[[str], None] = lambda _: None) -> str:
    """The Python of its environment, which is installed first if need be. EdgeflError with the installer's last words."""
    if (python := interpreter(peer)) is not None:
        return python
    home = folder(peer)
    shutil.rmtree(home, ignore_errors=True)
    say(f"{peer.name}: a new environment in {home}")
    _run(peer, [sys.executable, "-m", "venv", str(home)])
    python = str(home / "bin" / "python")
    say(f"{peer.name}: installing {', '.join(peer.requirements)}")
    _run(peer, [python, "-m", "pip", "install", "--quiet", *peer.requirements])
    (home / _COMPLETE).touch()
    return python


def _run(peer: Peer, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = last_line(done.stderr, f"exit code {done.returncode}")
        raise EdgeflError(f"{peer.name} cannot be installed: {last}", peer=peer.name)

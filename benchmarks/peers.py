"""Environments of other libraries, and the command ``peer`` that makes them.

Their requirements would constrain ours, so each environment is a folder of its own in the user's cache.
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
from typing import Annotated

import typer

from edgefl.cli.output import errors, print_json, print_table
from edgefl.data.datasets import download_folder
from edgefl.errors import ConfigError, EdgeflError
from edgefl.system.processes import last_line

_COMPLETE = ".complete"


@dataclass(frozen=True)
class Peer:
    """Another project's software. ``needed_by``: the benchmark; ``requirements``: arguments of pip."""

    name: str
    needed_by: str
    requirements: tuple[str, ...]


def peers() -> dict[str, Peer]:
    """Return all peers by name. Each has our release of torch. Raises PackageNotFoundError without torch."""
    torch = f"torch=={version('torch').partition('+')[0]}"
    simulate, train_step = "python -m benchmarks simulate", "python -m benchmarks train-step"
    known = (
        Peer("flower", "python -m benchmarks aggregate", ("flwr>=1.15",)),
        Peer("flower-torch", "python -m benchmarks footprint", ("flwr>=1.15", torch)),
        Peer("ort-training", train_step, ("onnxruntime-training==1.19.2", "onnx==1.16.2", torch)),
        Peer("pfl", simulate, ("pfl[pytorch]==0.6.*", torch)),
        Peer("flower-simulation", simulate, ("flwr[simulation]>=1.20", torch)),
        Peer("jax", train_step, ("jax>=0.5",)),
        Peer("onnxsim", train_step, ("onnxsim==0.8.1", "onnxruntime")),
    )
    return {peer.name: peer for peer in known}


def folder(peer: Peer) -> Path:
    """Return the folder of its environment, which differs by requirements and by Python version."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256("\n".join((python, *peer.requirements)).encode()).hexdigest()
    return download_folder() / "peers" / f"{peer.name}-{digest[:8]}"


def interpreter(peer: Peer) -> str | None:
    """Return the Python of its environment, or None if the environment is missing or incomplete."""
    home = folder(peer)
    return str(home / "bin" / "python") if (home / _COMPLETE).exists() else None


def make(peer: Peer, say: Callable[[str], None] = lambda _: None) -> str:
    """Return the Python of its environment. Installs the environment first if there is none.

    Raises:
        EdgeflError: the installation failed; with the installer's last line.
    """
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


def peer(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="whose environment to make")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object for each")] = False,
) -> None:
    """Make an environment for software of others that a benchmark measures, and print the path of its Python.

    Its requirements would constrain ours, so it is a folder of its own in the user's cache, made once. Without a name, print
    the known peers and whether they are installed.

    Examples:

      python -m benchmarks peer

      python -m benchmarks peer flower
    """

    known = peers()
    if name and name not in known:
        raise ConfigError(f"no peer {name!r}; choose one of: {', '.join(known)}", name=name)
    if name:
        make(known[name], errors.print)
    rows = [
        {
            "name": each.name,
            "needed_by": each.needed_by,
            "requirements": each.requirements,
            "python": interpreter(each),
        }
        for each in ([known[name]] if name else known.values())
    ]
    if as_json:
        for row in rows:
            print_json(row)
    elif name:
        typer.echo(rows[0]["python"])
    else:
        print_table("peers", rows)

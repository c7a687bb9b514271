"""Environments for software that is measured beside ours: made once, whole or not at all, found again by what is in them."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers import Peer
from edgefl.errors import EdgeflError
from tests.benchmarks.commands import invoke
from tests.tiny_wheel import tiny_wheel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_an_environment_has_what_was_asked_for_and_is_made_once(cache: Path) -> None:
    package = tiny_wheel(cache)
    peer = Peer("neighbour", "python -m benchmarks nothing", (str(package),))
    said: list[str] = []
    assert peers.interpreter(peer) is None

    python = peers.make(peer, said.append)

    assert python == peers.interpreter(peer) and Path(python).is_relative_to(cache)
    subprocess.run([python, "-c", "import neighbour"], check=True)
    assert len(said) == 2 and str(package) in said[1]
    assert peers.make(peer, said.append) == python and len(said) == 2
    assert peers.interpreter(replace(peer, requirements=("another",))) is None


@pytest.mark.slow
def test_a_failed_environment_is_none_with_the_installers_last_line(cache: Path) -> None:
    peer = Peer("nobody", "python -m benchmarks nothing", (str(cache / "nobody-1.0-py3-none-any.whl"),))

    with pytest.raises(EdgeflError, match=r"nobody cannot be installed: .*nobody-1\.0"):
        peers.make(peer)

    assert peers.folder(peer).exists() and peers.interpreter(peer) is None


def test_peers_are_listed_with_what_needs_them(cache: Path) -> None:
    table = invoke("peer")
    listed = invoke("peer", "--json")
    unknown = invoke("peer", "nobody")

    for peer in peers.peers().values():
        assert peer.name in table.stdout
        assert peer.name in listed.stdout and peer.needed_by in listed.stdout
    assert unknown.exit_code != 0 and "flower, flower-torch, ort-training" in str(unknown.exception)

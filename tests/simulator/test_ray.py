"""Clients that train in actors on Ray: the same bits as without it."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

import edgefl
from edgefl.simulator.rounds import SimulatedRounds
from tests.simulator.small import federation
from tests.simulator.test_workers import CASES, bits, killing
from tests.support.errors import ConfigError, refuses

CHOSEN = federation(**CASES["state on clients and at the server"])


def actors() -> list[psutil.Process]:
    """The processes of the actors: below the Ray that was started for them."""
    below = psutil.Process().children(recursive=True)
    return [each for each in below if each.status() != "zombie" and "ray::Worker" in " ".join(each.cmdline())]


@pytest.mark.slow
def test_actors_end_with_the_bits_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    here = edgefl.simulate(CHOSEN, tmp_path / "here")
    one = edgefl.simulate(CHOSEN, tmp_path / "one", ray="local")
    killed: list[int] = []

    def victims() -> list[psutil.Process]:
        found = actors()[:1]
        killed.extend(each.pid for each in found)
        return found

    monkeypatch.setattr(SimulatedRounds, "_take", killing(7, victims))
    two = edgefl.simulate(CHOSEN, tmp_path / "two", workers=2, ray="")

    assert bits(one.history) == bits(here.history)
    assert len(killed) == 1 and bits(two.history) == bits(here.history)
    assert not actors()


@pytest.mark.slow
def test_clusters_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    with pytest.raises(ConfigError, match=r"there is no Ray at 127\.0\.0\.1:9"):
        edgefl.simulate(CHOSEN, tmp_path, ray="127.0.0.1:9")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(ConfigError, match="has 1 cores for 2 workers"):
            edgefl.simulate(CHOSEN, tmp_path, workers=2, ray="local", resume=True)
    finally:
        ray.shutdown()


def test_without_ray_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ConfigError, package="ray"):
        edgefl.simulate(CHOSEN, tmp_path, ray="local")

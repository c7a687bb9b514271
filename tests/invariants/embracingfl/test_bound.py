"""EmbracingFL invariant 18: the right-hand side of Theorem 1."""

from __future__ import annotations

import pytest

from edgefl.errors import ConfigError
from reproduce.embracingfl import theory


def _bound(
    strong: int, *, lr: float = 0.01, rounds: int = 100, apart: float = 1.0, noise: float = 1.0
) -> float:
    y, z = theory.Part(2.0, noise, apart), theory.Part(1.0, 1.0, 1.0)
    return theory.bound(y, z, strong=strong, clients=8, tau=5, lr=lr, rounds=rounds, gap=1.0)


def test_i18_the_bound_falls_with_strong_clients_and_rounds_to_its_floor() -> None:
    assert _bound(1) > _bound(2) > _bound(8) and _bound(2) > _bound(2, rounds=1000)
    assert _bound(1, apart=0.0, noise=0.0) == _bound(8, apart=0.0, noise=0.0)
    assert _bound(2, lr=1e-6, rounds=10**12) == pytest.approx(14 / 6, rel=1e-3)
    with pytest.raises(ConfigError, match="allows step sizes up to"):
        _bound(2, lr=1.0)

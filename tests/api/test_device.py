"""How the API opens a device's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgefl
from edgefl.api.device import DeviceLimits
from edgefl.errors import ConfigError
from edgefl_device.host import physical_memory


@pytest.mark.parametrize(("offered", "expected"), [(0, physical_memory()), (1 << 20, 1 << 20)])
def test_the_engines_process_has_a_limit_also_where_nobody_named_one(
    offered: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the agent tells the server."""
    asked: dict[str, object] = {}

    def refuse(*_: Any, **named: object) -> None:
        asked.update(named)
        raise ConfigError("it is not opened")

    monkeypatch.setattr("edgefl_device.sandbox.process.open_sandboxed", refuse)
    limits = DeviceLimits(memory=offered, sandbox="always")
    with pytest.raises(ConfigError):
        edgefl.Agent("phone", tmp_path, folder=tmp_path, limits=limits)
    assert asked["memory_bytes"] == expected > 0

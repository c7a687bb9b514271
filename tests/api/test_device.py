"""How the API opens a device's engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.api.device import boxed_engine, broker_address
from edgefl_device.config import AgentConfig
from edgefl_device.host import physical_memory


@pytest.mark.parametrize(("offered", "expected"), [(0, physical_memory()), (1 << 20, 1 << 20)])
def test_the_engines_process_has_a_limit_also_where_nobody_named_one(
    offered: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that the agent tells the server."""
    asked: dict[str, object] = {}
    monkeypatch.setattr(
        "edgefl_device.sandbox.engine.open_sandboxed", lambda *_, **named: asked.update(named)
    )
    config = AgentConfig(
        federation="demo",
        device="phone",
        broker=broker_address("localhost:1883"),
        data=tmp_path,
        folder=tmp_path,
        memory_bytes=offered,
    )
    boxed_engine("onnx", 1, 1, config)
    assert asked["memory_bytes"] == expected > 0

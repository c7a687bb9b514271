"""Variants of a graph from the server to a device, and what the device found back to the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgefl.wire.limits import Limits
from edgefl.wire.update.form import DENSE
from edgefl_device.round.autotune import Autotuner
from edgefl_server.events import DeviceSeen
from edgefl_server.run_spec import DownlinkSpec
from tests.conftest import Mosquitto
from tests.device_runtime.agent.scripted import RunningAgent
from tests.device_runtime.tiny_forms import with_forms
from tests.e2e.test_wire_bytes import plan
from tests.server.fleet import RunningServer

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_a_device_tries_variants_once(
    mosquitto: Mosquitto, federation: str, limits: Limits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    once = Autotuner.fastest

    def counted(*arguments: Any, **options: Any) -> Any:
        tried.append("")
        return once(*arguments, **options)

    monkeypatch.setattr(Autotuner, "fastest", counted)
    made = plan(federation, limits, DownlinkSpec("float32", 10, "zstd"), DENSE, "onnx")
    weak = made.tiers["weak"]
    made = replace(made, tiers={"weak": replace(weak, bundle=with_forms(weak.bundle))})

    server = RunningServer.start(made, mosquitto.address, tmp_path / "out")
    agent = RunningAgent(federation, mosquitto.address, tmp_path, limits, until_done=True, tune=True)
    server.join()

    assert agent.ended() is None
    reports = [event for event in server.seen_of(DeviceSeen) if event.stage == "reported"]
    assert len(reports) == 3 and len(tried) == 1
    for report in reports:
        assert {*report.dropped} == {"train/wrong", "train/unknown", "train/damaged"}
        assert report.variants["train"] in ("", "same")

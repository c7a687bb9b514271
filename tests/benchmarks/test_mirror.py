"""The trial of a large model, with a small one: both ways whole, and counted where they came from."""

from __future__ import annotations

import pytest

from benchmarks.mirror import measure
from benchmarks.workers.mirror import Route
from tests import needs

NBYTES = (5 << 20) + 7


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", ["broker", "mirror"])
def test_a_model_arrives_whole_by_either_way(way: Route) -> None:
    needs.require("mosquitto")
    row = measure(way, NBYTES, 1 << 20)

    assert (row.way, row.bytes, row.units, row.page_bytes) == (way, NBYTES, 6, 0)
    assert (row.broker_bytes, row.mirror_bytes) == ((NBYTES, 0) if way == "broker" else (0, NBYTES))
    assert row.mirror_peak_bytes > 0 if way == "mirror" else row.mirror_peak_bytes == 0
    assert min(row.device_peak_bytes, row.server_peak_bytes, row.broker_peak_bytes) > 1 << 20

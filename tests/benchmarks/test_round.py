"""The benchmark of a round's time, with real processes."""

from __future__ import annotations

from benchmarks.round import measure


def test_measure_times_rounds_of_devices_that_train_nothing() -> None:
    row = measure(devices=1, model="mlp", rounds=2, broker="amqtt")

    assert 0 < row.round_min_s <= row.round_s and row.up_bytes > 0

"""Events of a server, as tests need them."""

from __future__ import annotations

from typing import Any

from edgefl_server.events import DeviceEvaluation, GroupResult, RoundClosed


def round_closed(number: int = 1, **changes: Any) -> RoundClosed:
    """Return the end of a round that two devices reported in."""
    fields = {"round": number, "outcome": "closed", "accuracy": 0.5, "loss": 1.0, "train_loss": 1.0}
    fields |= {"seconds": 1.0, "reports": 2, "rejected": 0, "weights_sha256": f"{number % 10}" * 64}
    fields |= {"down_bytes": 1, "up_bytes": 2, "server_down_bytes": 3}
    return RoundClosed(**{**fields, **changes})


def device_evaluation(**changes: Any) -> DeviceEvaluation:
    """Return the results of five devices, three of them weak, and of a strong tier that is too small to be shown."""
    everyone = group_result(5, 0.782, (0, 0, 0, 0, 0, 0, 1, 3, 1, 0))
    weak = group_result(3, 0.7, (0, 0, 0, 0, 0, 0, 1, 2, 0, 0))
    fields = {"trained_rounds": 5, "metric": "accuracy", "devices": everyone, "tiers": {"weak": weak}}
    return DeviceEvaluation(**{**fields, "sums": {"correct": 39 << 16}, "left_out": ("strong",), **changes})


def group_result(devices: int, accuracy: float, histogram: tuple[int, ...]) -> GroupResult:
    return GroupResult(
        devices=devices,
        rows=50.0,
        metrics={"accuracy": accuracy, "loss": 0.61},
        median={"accuracy": 0.755, "loss": 0.6},
        worst_decile={"accuracy": 0.654, "loss": 0.9},
        histogram=histogram,
    )

"""The phone table: ratios beside the paper's, and what must hold of them."""

from __future__ import annotations

import pytest

from benchmarks.device_table import EMBRACING, TIERS, WIDTH, DeviceTimes
from reproduce.embracingfl import device
from reproduce.results import Judged, Results


def times(weak: float = 20.0) -> list[DeviceTimes]:
    backward = {
        EMBRACING: dict(zip(TIERS, (100.0, 50.0, weak), strict=True)),
        WIDTH: dict(zip(TIERS, (100.0, 20.0, 5.0), strict=True)),
    }
    return [
        DeviceTimes("onnx", "resnet20", method, tier, 10.0, backward[method][tier])
        for method in backward
        for tier in TIERS
    ]


def judged(weak: float) -> list[Judged]:
    results = Results([0], {device.ARM: [device.figures(times(weak))]}, {device.ARM: [{}]})
    return [claim.judge(results) for claim in device.ENTRY.claims]


def test_ratios_stand_beside_the_papers() -> None:
    found, paper = device.figures(times()), device.published()

    weak, narrow = (
        f"onnx, resnet20, {name}: backward / strong"
        for name in ("EmbracingFL, weak", "width reduction, moderate")
    )
    assert (found[weak], round(paper[weak], 3)) == (0.2, 0.204)
    assert (found[narrow], round(paper[narrow], 3)) == (0.2, 0.754)


@pytest.mark.parametrize(
    ("weak", "held"), [(20.0, [True, True]), (26.0, [True, False]), (60.0, [False, False])]
)
def test_a_weak_tier_that_takes_too_long_is_no_claim_held(weak: float, held: list[bool]) -> None:
    assert [each.held for each in judged(weak)] == held

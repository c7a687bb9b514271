"""A step in Chromium beside the native one: what is measured is the same training."""

from __future__ import annotations

import math

import pytest

from benchmarks.web import cases, measure
from edgefl.errors import ConfigError
from tests.agents.web.pages import require_page


def test_tiers_come_from_weak_to_strong() -> None:
    assert cases(("cnn",)) == [("cnn", "weak"), ("cnn", "moderate"), ("cnn", "strong")]
    assert cases(("resnet20", "cnn"), ("weak",)) == [("resnet20", "weak"), ("cnn", "weak")]
    with pytest.raises(ConfigError, match="there are: strong, moderate, weak"):
        cases(("cnn",), ("huge",))


@pytest.mark.slow
def test_a_step_in_chromium_is_measured_beside_the_native_one() -> None:
    require_page()
    row = measure("cnn", "weak", batch=4, repeat=1)

    assert row.steps >= 2 and row.ms_min > 0 and row.native_ms_min > 0
    assert row.ratio == pytest.approx(row.ms_min / row.native_ms_min, rel=0.01)  # which are rounded
    assert row.wasm_bytes >= 2**20 and row.peak_over_idle_bytes > 0
    assert math.isfinite(row.loss) and row.loss < math.log(62), "it trains: the loss is below that of a guess"
    assert row.browser.startswith("Chrome/")

"""FedBAT's step sizes can run away: that the metrics tell, and that bounds end it (an addition to fedbat.md 2.4)."""

from __future__ import annotations

import numpy as np
import pytest

from edgefl.codecs.growth import warning
from tests.invariants.embracingfl.tiny import tiny
from tests.invariants.fedbat.tiny import Feed, Trace, algorithm_of, regression, walk
from tests.rings.rows import mostly_slow

# -- step sizes that run away ----------------------------------------------------------------------------------

SPEC = tiny("cnn")
RUN = {"batch": 32, "steps": 100, "rho": 6.0, "lr": 0.1}
SEEDS = range(5)


def runaway(seed: int, **options: object) -> Trace:
    spec = regression(seed)
    return walk(algorithm_of(spec, **RUN, **options), spec.weights, Feed.linear(spec, seed))


@pytest.mark.parametrize("seed", mostly_slow(SEEDS, [0, 3]))
def test_on_356_parameters_step_sizes_run_away(seed: int) -> None:
    assert sum(p.numel() for p in regression(0).module.parameters()) == 356
    trace = runaway(seed)
    told = float(np.mean(trace.metric("alpha_growth")))
    assert warning({"alpha_growth": told}) is not None, told
    assert trace.metric("clamped")[-1] > 0, "and a step size is at its limit in the end"


@pytest.mark.slow
def test_the_range_of_the_public_code_ends_the_runaway() -> None:
    for seed in SEEDS:
        free, limited = runaway(seed), runaway(seed, alpha_range=(5e-4, 5e-2))
        assert max(limited.metric("alpha_growth")) <= 100
        assert sum(limited.metric("clamped")) > 0
        assert max(limited.metric("loss")) < 3 * limited.metric("loss")[0]
        assert max(free.metric("loss")) >= max(limited.metric("loss"))


@pytest.mark.slow
def test_a_classifier_does_not_set_off_the_alarm() -> None:
    trace = walk(algorithm_of(SPEC, steps=40, batch=32), SPEC.weights, Feed.of(SPEC))
    told = float(np.mean(trace.metric("alpha_growth")))
    assert told < 5 and warning({"alpha_growth": told}) is None
    assert not any(trace.metric("clamped"))


def test_a_warning_names_the_remedy_and_other_codecs_have_none() -> None:
    assert "alpha_range" in (warning({"loss": 1.0, "alpha_growth": 1e4}) or "")
    assert warning({"loss": 1.0}) is None and warning({"alpha_growth": 1.0}) is None

"""A candidate on trial with a service and scripted devices over a real broker: its updates go into the same sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgefl.wire import tensors
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Decline, Round, Task
from edgefl_server.coordinator.rollout import RolloutRules
from edgefl_server.coordinator.roster import CANDIDATE, base_of
from edgefl_server.events import Finished, RolloutJudged, RolloutStarted, RoundClosed, UpdateAccepted
from edgefl_server.run_spec import RunSpec
from tests.server.fleet import (
    PROFILE,
    WEIGHTS,
    MakeDevice,
    RunningServer,
    ScriptedDevice,
    Serve,
    expected_mean,
    plan_for,
)

RULE = RolloutRules(
    seed=7,
    tiers=("strong",),
    share=0.4,
    rounds=2,
    most_loss_increase=0.1,
    most_failures=0.2,
    most_slowdown=2.0,
)
NAMES = [f"strong-{n}" for n in range(4)]
Answer = Callable[[ScriptedDevice, Task, Round], None]


def on_trial(federation: str, limits: Limits, **rules: Any) -> RunSpec:
    plan = plan_for(federation, limits, min_devices=4, rollout=RULE, **rules)
    return replace(plan, tiers={**plan.tiers, f"strong{CANDIDATE}": plan.tiers["strong"]})


def reporting(candidate_loss: float, candidate_ms: float = 1.0) -> Answer:
    """Answers as asked; with the candidate with this loss, and so long steps."""

    def answer(device: ScriptedDevice, task: Task, opened: Round) -> None:
        assert task.tier in opened.offer("onnx").bundles
        tried = task.tier.endswith(CANDIDATE)
        ms, loss = (candidate_ms, candidate_loss) if tried else (1.0, 1.0)
        profile = msgspec.structs.replace(PROFILE, step_ms=ms)
        like_all = Task(
            **{name: getattr(task, name) for name in ("run", "round", "seed", "nonce")},
            tier=base_of(task.tier),
        )
        device.report(like_all, opened, tier=task.tier, metrics={"loss": loss}, profile=profile)

    return answer


@pytest.fixture
def begin(serve: Serve, federation: str, limits: Limits) -> Serve:
    return lambda **rules: serve(on_trial(federation, limits, **rules))


def tiers_of(server: RunningServer, number: int) -> dict[str, str]:
    return {event.device: event.tier for event in server.seen_of(UpdateAccepted) if event.round == number}


def test_a_good_candidate_is_promoted_after_its_trial_also_over_a_restart(
    device: MakeDevice, begin: Callable[..., RunningServer], tmp_path: Path
) -> None:
    for name in NAMES:
        device(name, reporting(0.9))
    first = begin(rounds=4)
    assert first.wait_for(RolloutStarted).devices == {"strong": 2}
    first.wait_for(RoundClosed)
    first.stop()

    second = begin(rounds=4)
    second.wait_for(Finished)
    second.join()
    seen = {n: tiers_of(first, n) | tiers_of(second, n) for n in range(1, 5)}
    judged = [*first.seen_of(RolloutJudged), *second.seen_of(RolloutJudged)]
    assert [(event.round, event.promoted) for event in judged] == [(2, True)]
    assert sorted(seen[1].values()) == sorted(seen[2].values()) == ["strong"] * 2 + ["strong@candidate"] * 2
    assert seen[1] == seen[2] and set(seen[3].values()) == set(seen[4].values()) == {"strong@candidate"}

    model = tensors.load((tmp_path / "out" / "model.safetensors").read_bytes())
    last = expected_mean(WEIGHTS, [(name, "strong", 4) for name in NAMES])
    for name, value in last.items():
        np.testing.assert_allclose(model[name], value, atol=1e-6)


def test_a_bad_candidate_is_taken_back(device: MakeDevice, begin: Callable[..., RunningServer]) -> None:
    for name in NAMES:
        device(name, reporting(1.5))
    server = begin(rounds=3)
    judged = server.wait_for(RolloutJudged)
    closed = server.wait_for(RoundClosed, lambda event: event.round == 3)
    server.join()
    assert not judged.promoted and "training loss of 1.5" in judged.text and closed.reports == 4
    assert set(tiers_of(server, 2).values()) == {"strong", "strong@candidate"}
    assert set(tiers_of(server, 3).values()) == {"strong"}


def test_a_declined_candidate_is_taken_back(device: MakeDevice, begin: Callable[..., RunningServer]) -> None:
    def answer(each: ScriptedDevice, task: Task, opened: Round) -> None:
        if task.tier.endswith(CANDIDATE):
            each.say(each.mine.declines, Decline(round=task.round, nonce=task.nonce, reason="no-memory"))
        else:
            each.report(task, opened)

    for name in NAMES:
        device(name, answer)
    server = begin(rounds=3)
    judged = server.wait_for(RolloutJudged)
    assert (judged.round, judged.promoted) == (2, False) and "4 of 4 tasks" in judged.text
    assert server.wait_for(RoundClosed, lambda event: event.round == 3).reports == 4
    server.join()

"""The norm that a gradient is scaled down to, in every baseline (fafed.md 4.4): before whatever else is made of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from edgefl import algorithms
from edgefl.errors import ConfigError
from edgefl.models.zoo.catalog import build_model
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl_export.capture.trace import capture
from edgefl_export.onnx.model import to_onnx
from edgefl_export.verify.graphs import verify
from tests.algorithms.users import Users, Vector, flat
from tests.pairs import by_default

BATCH, STEPS, LR, ROUNDS, CLIP = 4, 3, 0.02, 3, 3.0
TRAINING = {"batch": BATCH, "steps": STEPS, "lr": LR, "clip": CLIP}
Correction = Callable[[Vector, Vector], Vector]


def _down(g: Vector) -> Vector:
    return g * min(1.0, CLIP / float(np.linalg.norm(g)))


def _local(users: Users, user: int, x: Vector, number: int, added: Correction, seen: list[float]) -> Vector:
    """Local steps along the clipped gradient and what is added to it at (y, x); norms go to ``seen``."""
    y = x
    for step in range(STEPS):
        g = users.gradient(user, y, users.batch(user, number, step, BATCH))
        seen.append(float(np.linalg.norm(g)))
        y = y - LR * (_down(g) + added(y, x))
    return y


def _close(found: Vector, wanted: Vector) -> bool:
    return bool(np.allclose(found, wanted, rtol=1e-10, atol=1e-12))


@pytest.mark.parametrize(
    ("name", "options", "added"),
    [
        ("fedavg", {}, lambda y, x: 0.0 * y),
        ("fedavg_update", {}, lambda y, x: 0.0 * y),
        ("fedprox", {"mu": 0.7}, lambda y, x: 0.7 * (y - x)),
        ("sgd", {"momentum": 0.0, "weight_decay": 0.5, "decay_all": True}, lambda y, x: 0.5 * y),
    ],
)
def test_only_the_gradient_is_scaled_down(name: str, options: dict[str, float], added: Correction) -> None:
    users, seen = Users(), list[float]()

    found = users.run(algorithms.build(name, users.objective, **TRAINING, **options), ROUNDS)

    x = users.theta
    for number in range(1, ROUNDS + 1):
        x = np.mean([_local(users, user, x, number, added, seen) for user in range(3)], axis=0)
        assert _close(flat(found[number - 1].weights), x)
    assert min(seen) < CLIP < max(seen), "both sides of the minimum are tried"


def test_scaffold_corrects_the_clipped_gradient() -> None:
    users, seen = Users(), list[float]()

    found = users.run(algorithms.build("scaffold", users.objective, **TRAINING), ROUNDS)

    x, c, own = users.theta, np.zeros(4), np.zeros((3, 4))
    for number in range(1, ROUNDS + 1):
        left = [
            _local(users, user, x, number, lambda y, x, v=c - own[user]: v, seen)  # type: ignore[misc]
            for user in range(3)
        ]
        new = np.stack([own[user] - c + (x - left[user]) / (STEPS * LR) for user in range(3)])
        x, c, own = np.mean(left, axis=0), c + (new - own).mean(0), new
        assert _close(flat(found[number - 1].weights), x)
    assert min(seen) < CLIP < max(seen)


def test_fedavg_at_the_gradients_of_meta_learning_clips_as_fedavg_does() -> None:
    users = Users()
    options = {**TRAINING, "steps": STEPS // 3, "factor": 3}
    found = users.run(algorithms.build("fedavg_matched", users.objective, **options), 1)
    plain = users.run(algorithms.build("fedavg", users.objective, **TRAINING), 1)

    for user in range(3):
        assert _close(flat(found[0].updates[user]), flat(plain[0].updates[user]))
    unclipped = users.run(algorithms.build("fedavg", users.objective, **{**TRAINING, "clip": None}), 1)
    assert not _close(flat(unclipped[0].weights), flat(plain[0].weights))


@pytest.mark.parametrize("clip", [0.0, -1.0, float("inf")])
@pytest.mark.parametrize("name", ["sgd", "fedavg", "fedprox", "scaffold"])
def test_a_norm_that_cannot_be_is_named(name: str, clip: float) -> None:
    with pytest.raises(
        ConfigError, match=f"algorithm '{name}': clip is {clip}; set it to a finite number above 0"
    ):
        algorithms.build(name, Users().objective, clip=clip)


@pytest.mark.parametrize(
    ("name", "clip"),
    by_default(product(["fedavg", "scaffold"], [0.1, 1e3]), [("fedavg", 0.1), ("scaffold", 1e3)]),
)
def test_the_exported_step_clips_as_torch_does(name: str, clip: float) -> None:
    spec = build_model("mlp", size=4, hidden=[6], classes=3)
    made = algorithms.build(name, Objective.of(OutputSide(spec, 0)), batch=4, steps=2, lr=0.05, clip=clip)
    step = made.phases[0].function
    assert verify(step, to_onnx(capture(step)), seed=3).worst <= 1e-4

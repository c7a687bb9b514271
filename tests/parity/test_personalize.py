"""Personalization on the device runtime equals that in torch, for every kind of tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgefl.analysis.personal.evaluate import User, evaluate_user
from edgefl.analysis.personal.report import EvaluationSetting
from edgefl.contract.tensors import prefixed
from edgefl.wire import tensors
from edgefl_device.data.samples import LocalData
from edgefl_device.data.support import Protocol, batch_rows, held_out
from edgefl_device.personal.personalize import Adaptation, Personalizer, graphs_of
from edgefl_device.round.offline import offline_job, read_weights
from edgefl_export.compiler.compiler import target_of
from tests.analysis.personal.tiers import BATCH, Tier, tier_of
from tests.invariants.embracingfl.tiny import samples
from tests.pairs import in_turn
from tests.parity.forms import engine_of

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("mlp", "output_side", {"cut": 0}),
    ("resnet8", "output_side", {"cut": 3, "chunks": 2}),
    ("mlp", "width", {"gamma": 0.25}),
    ("cnn", "importance", {"gamma": 0.25}),
    ("mlp", "importance_structured", {"gamma": 0.5}),
]
EACH = pytest.mark.parametrize(("model", "kind", "options", "form"), in_turn(KINDS[:1], rare=KINDS[1:]))


@EACH
def test_the_exported_step_equals_torch(model: str, kind: str, options: dict[str, Any], form: str) -> None:
    tier = tier_of(model, kind, form=form, **options)
    step = tier.algorithm.personalize
    assert step is not None

    report = target_of(form).verify(step, tier.bundle.graph_bytes("personalize"), seed=5)

    assert report.worst <= 1e-4


@EACH
def test_a_device_reports_what_torch_does(
    tmp_path: Path, model: str, kind: str, options: dict[str, Any], form: str
) -> None:
    tier, local, later = _world(form, model, kind, **options)

    report, _ = _personalizer(tier, tmp_path).run(
        tier.job(), local, Adaptation(steps=2, curve=(0, 1, 5), alpha=0.05, test=later)
    )

    user = User.of(0, train=_tensors(local), test=_tensors(later))
    expected = evaluate_user(tier.adapter, user, EvaluationSetting(0.05, (1, 2, 5), BATCH))
    for mine, theirs in zip(report.curve, expected.curve, strict=True):
        assert mine.steps == theirs.steps
        assert mine.metrics == pytest.approx(theirs.metrics, abs=1e-5)
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-3)
    assert (report.support, report.query) == (expected.support, expected.query)
    assert report.majority == expected.majority


@EACH
def test_the_adapted_weights_are_those_of_torch(
    tmp_path: Path, model: str, kind: str, options: dict[str, Any], form: str
) -> None:
    tier, local, _ = _world(form, model, kind, **options)

    _, adapted = _personalizer(tier, tmp_path).run(tier.job(), local, Adaptation(steps=3, alpha=0.05))

    now = _adapted_in_torch(tier, local, 3)
    for name, array in adapted.items():
        scale = max(1e-3, float(now[name].abs().max()))
        assert np.abs(array - now[name].numpy()).max() <= 1e-4 * scale, name


@pytest.mark.parametrize(("protocol", "form"), in_turn(["split_test", "paper_literal"]))
def test_the_other_protocols_split_alike(tmp_path: Path, protocol: Protocol, form: str) -> None:
    tier, local, later = _world(form, "mlp", cut=0)

    report, _ = _personalizer(tier, tmp_path).run(
        tier.job(), local, Adaptation(protocol=protocol, alpha=0.1, test=later, seed=4)
    )

    user = User.of(0, train=_tensors(local), test=_tensors(later))
    expected = evaluate_user(tier.adapter, user, EvaluationSetting(0.1, (), BATCH, protocol, 4))
    assert report.after.metrics == pytest.approx(expected.after(1).metrics, abs=1e-5)
    assert report.after.loss == pytest.approx(expected.after(1).loss, rel=1e-4)
    assert (report.leaks, report.support) == (expected.leaks, expected.support)


@pytest.mark.slow
@pytest.mark.parametrize("form", in_turn([()]))
def test_a_payload_tier_goes_on_from_what_an_earlier_personalization_left(tmp_path: Path, form: str) -> None:
    tier, local, _ = _world(form, "cnn", "importance", gamma=0.25)
    first, adapted = _personalizer(tier, tmp_path).run(tier.job(), local, Adaptation(alpha=0.05))
    (tmp_path / "mine.safetensors").write_bytes(tensors.dump(adapted))
    job, blobs = offline_job(
        tier.bundle,
        read_weights(tmp_path / "mine.safetensors"),
        graphs_of(tier.bundle.manifest),
        "mine.safetensors",
    )
    again = Personalizer(engine=engine_of(form), manifest=tier.bundle.manifest, blobs=blobs, folder=tmp_path)

    second, _ = again.run(job, local, Adaptation(alpha=0.05))

    assert (second.before.loss, second.before.metrics) == (first.after.loss, first.after.metrics)


def _world(
    form: str, model: str, kind: str = "output_side", **options: Any
) -> tuple[Tier, LocalData, LocalData]:
    tier = tier_of(model, kind, form=form, **options)
    return tier, _local(tier, 33, 1), _local(tier, 24, 2)


def _local(tier: Tier, count: int, seed: int) -> LocalData:
    x, y = samples(tier.spec, count, seed)
    return LocalData(x.numpy(), y.remainder(3).numpy(), "random")


def _tensors(data: LocalData) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(data.x), torch.from_numpy(data.y)


def _personalizer(tier: Tier, folder: Path) -> Personalizer:
    return Personalizer(engine=engine_of(tier.form), manifest=tier.bundle.manifest, blobs=tier, folder=folder)


def _adapted_in_torch(tier: Tier, local: LocalData, steps: int) -> dict[str, torch.Tensor]:
    """On the rows that a device without test data adapts to."""
    adapter = tier.adapter
    x, y = _tensors(local)
    kept = torch.from_numpy(held_out(local.y, seed=0).train)
    user = User(0, x, y, held_out(local.y, seed=0))
    parts = adapter.rows(user, kept.numpy())
    now = prefixed("weights", adapter.weights)
    for step in range(steps):
        at = torch.from_numpy(batch_rows(len(kept), BATCH, step, seed=0))
        batch = prefixed("batch.0", {part: each[at] for part, each in parts.items()})
        given = now | batch | {"hyper.alpha": torch.tensor(0.05)}
        out = adapter.step({name: given[name] for name in adapter.step.inputs})
        now = now | {name: tensor for name, tensor in out.items() if name.startswith("weights.")}
    return {name.removeprefix("weights."): tensor for name, tensor in now.items()}

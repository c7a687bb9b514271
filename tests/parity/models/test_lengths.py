"""Graphs for shorter samples beside the whole one: a batch costs what its longest sample needs, and trains the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edgefl import algorithms
from edgefl.api.model import sample_spec
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import TensorSpec
from edgefl.models.spec import ModelSpec
from edgefl.models.split import split
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.bundle.manifest import Bucket
from edgefl_device.data.samples import Batches, LabelSpec, LocalData
from edgefl_device.round.inputs import RoundInputs
from edgefl_export.compiler.algorithm import with_shorter
from tests.models.test_inputs import CLASSES, LENGTH, TEXT, WIDTH, WORDS, reader
from tests.pairs import in_turn
from tests.parity.rounds import Exported, in_torch, on_device
from tests.support.bundles import build_bundle
from tests.support.errors import BundleError, ConfigError, ModelError, refuses

SHORT = (2, 4)


def trained(spec: ModelSpec) -> Algorithm:
    return algorithms.build("sgd", Objective.of(OutputSide(spec, 0)), batch=4, steps=6, lr=0.1)


class Bag(nn.Module):
    """The mean of the words, read once more by what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask.unsqueeze(-1).float()
        return self.head((self.words(ids) * weights).sum(1) / weights.sum(1).clamp_min(1.0))


@cache
def tier(form: str = "onnx", make: Callable[[], nn.Module] = Bag) -> Exported:
    torch.manual_seed(0)
    spec = split(make(), sample=TEXT, classes=CLASSES)
    algorithm = with_shorter(trained(spec), {length: trained(spec.shortened(length)) for length in SHORT})
    bundle = build_bundle(algorithm, spec.units, model=spec.name, data=sample_spec(spec, None), format=form)
    return Exported(spec, OutputSide(spec, 0), algorithm, (), bundle)


def data(rows: int = 12) -> LocalData:
    """Texts of one to six words, padded with 0."""
    rng = np.random.default_rng(7)
    mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (rows, 1))).astype(np.int64)
    x = rng.integers(1, WORDS, (rows, LENGTH)) * mask
    return LocalData(x, rng.integers(0, CLASSES, rows), "texts", {"attention_mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize(("make", "form"), in_turn([(Bag,)], rare=[(reader,)]))
def test_a_round_by_length_equals_the_whole(make: Callable[[], nn.Module], form: str, tmp_path: Path) -> None:
    made = tier(form, make)
    manifest = msgspec.structs.replace(made.bundle.manifest, draws="walk")
    walked = replace(made, bundle=replace(made.bundle, manifest=manifest))
    found, _ = on_device(walked, data(), 5, tmp_path, form)

    expected = in_torch(walked, data(), 5)
    for name, array in found.update.items():
        assert np.allclose(array, expected[name].numpy(), atol=1e-5), name


@pytest.mark.slow
def test_every_batch_takes_the_shortest_graph_that_holds_it() -> None:
    manifest = tier().bundle.manifest
    fitted = data(40).fitted(manifest.data, LabelSpec.of(manifest))
    feeds, (phase,) = RoundInputs(1, fitted, draws="length", edges=SHORT), manifest.phases
    spec = manifest.graph(phase.graph)
    for step in range(10):
        longest = feeds.longest_sample(spec, step)
        chosen = manifest.graph(phase.graph_for(longest))
        (port,) = (port for port in chosen.inputs if port.name == "batch.0.x")
        assert port.shape[1] == min(size for size in (*SHORT, LENGTH) if size >= longest)
        batch = feeds.batch(spec, step, chosen)
        assert batch["batch.0.attention_mask"].sum(axis=1).max() == longest
    assert {phase.graph_for(feeds.longest_sample(spec, step)) for step in range(10)} == {
        "train.2",
        "train.4",
        "train",
    }
    assert [port.shape[0] for port in chosen.inputs_of("batch")] == [4, 4, 4]


def test_batches_of_like_length_hold_every_sample_once_an_epoch() -> None:
    buckets = np.random.default_rng(0).integers(0, 3, 20)
    batches = Batches(3, 20, 5, "length", buckets)
    epochs = [[batches.indices(0, step) for step in range(4 * epoch, 4 * epoch + 4)] for epoch in range(2)]

    assert all(sorted(np.concatenate(epoch).tolist()) == list(range(20)) for epoch in epochs)
    spread = sum(len({*buckets[rows].tolist()}) for rows in epochs[0])
    plain = Batches(3, 20, 5)
    assert spread < sum(len({*buckets[plain.indices(0, step)].tolist()}) for step in range(4))


def test_lengths_end_at_the_last_token_that_is_no_padding() -> None:
    manifest = tier().bundle.manifest
    x = np.array([[3, 0, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
    seen = LocalData(x, np.zeros(3, np.int64), "texts", {"attention_mask": np.ones_like(x)})
    assert seen.fitted(manifest.data).lengths.tolist() == [3, 1, 6]


def test_shorter_graphs_share_the_state_of_the_whole_one() -> None:
    manifest = tier().bundle.manifest
    whole, *shorter = (manifest.graph(name) for name in ("train", "train.2", "train.4"))
    assert all(each.outputs_of("state") == whole.outputs_of("state") for each in shorter)
    assert len(manifest.of_round) == 5
    (phase,) = manifest.phases
    wrong = msgspec.structs.replace(
        phase, shorter=(Bucket(length=4, graph="train.4"), Bucket(length=2, graph="train.2"))
    )
    from edgefl.wire.bundle.manifest import decode_manifest, encode_manifest

    with pytest.raises(BundleError, match="which should ascend from 1 on"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, phases=(wrong,))))


class Flat(nn.Module):
    """Its weights know how long a sample is."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 3), nn.Linear(3 * LENGTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).flatten(1))


def test_what_has_one_length_says_so() -> None:
    sample = TensorSpec((LENGTH,), torch.int64, WORDS)
    with pytest.raises(ModelError):
        split(Flat(), sample=sample, classes=CLASSES).shortened(3)
    spec = split(reader(), sample=TEXT, classes=CLASSES)
    with refuses(ModelError, length=6):
        spec.shortened(6)
    mime = algorithms.build("mimelite", Objective.of(OutputSide(spec, 0)), batch=4, steps=2)
    with refuses(ConfigError, algorithm="mimelite"):
        with_shorter(mime, {2: mime})

"""From a trained global model to one ONNX file of a submodel of any size, with the facts that people need to use it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from edgefl.config import Federation, TierTable
from edgefl.data.dataset import Dataset
from edgefl.models.spec import ModelSpec
from edgefl.submodels.cost import macs_by_weight
from edgefl.submodels.output_side import OutputSide
from edgefl.submodels.standalone import scores, standalone
from edgefl.submodels.statistics import collect, frozen, norms
from edgefl.submodels.submodel import Submodel
from edgefl.wire.errors import ConfigError
from edgefl.wire.tensors import Array
from exporters.deploy import INPUT, OUTPUT, Artifact, deploy
from server.compose import submodel_of

CHECKED_ROWS = 64
ROWS = 500
"""Rows at a time where that does not matter, and the batches that statistics are taken from."""

BnEval = Literal["frozen", "batch"]


@dataclass(frozen=True)
class Deployment:
    """An artifact and what to know about it, in types that JSON knows."""

    artifact: Artifact
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Workshop:
    """What every submodel of one trained model is made from: the same data and rules, so that they can be compared.

    ``bn_eval`` is about static batch norm: ``frozen`` gives each submodel statistics of its own, from one pass over the
    first ``samples`` training images (0: all); ``batch`` normalises with those of whatever batch comes, which depend on
    its size and classes (fiarse.md A11). ``batch`` images go through the artifact at a time. ConfigError if
    these do not go together.
    """

    spec: ModelSpec
    dataset: Dataset
    weights: Mapping[str, Array]
    bn_eval: BnEval = "frozen"
    batch: int = 1
    samples: int = 0

    def __post_init__(self) -> None:
        if self.bn_eval == "batch" and not self._static:
            raise ConfigError(
                f"{self.spec.name} has no static batch norm (model.bn): its batches have no say; take bn-eval frozen",
                model=self.spec.name,
            )
        if self.bn_eval == "batch" and self.batch < 2:
            raise ConfigError(
                f"bn-eval batch normalises with the statistics of a batch, found batch {self.batch}: take a larger one, "
                f"such as {ROWS}",
                batch=self.batch,
            )

    def deployment(
        self, submodel: Submodel, smaller: Callable[[nn.Sequential], nn.Sequential] = lambda module: module
    ) -> Deployment:
        """The artifact of ``submodel``, checked on test images, and its facts.

        ``smaller`` may replace the finished module by one that computes the same. ModelError if the weights are not
        the model's, ExportError if the artifact does not agree with torch.
        """
        module = smaller(self.module(submodel))
        rows = self._floats(self.dataset.test_x[:CHECKED_ROWS])
        artifact = deploy(module, self.spec.sample, rows, batch=self.batch)
        facts = self._facts(submodel, module, artifact) | {
            "accuracy": self.accuracy(module),
            "whole_accuracy": self.accuracy(self.module(OutputSide(self.spec, 0))),
        }
        return Deployment(artifact, facts)

    def module(self, submodel: Submodel) -> nn.Sequential:
        """``submodel`` on its own, in inference mode."""
        made = standalone(submodel, self.weights)
        return frozen(made, collect(made, self._training())) if self._batch_norm == "frozen" else made

    def accuracy(self, module: nn.Sequential) -> float:
        """Share of the test set that is right. Where the batch has a say, in full batches of the artifact's size."""
        x, y = self.dataset.test_x, self.dataset.test_y
        step, last = ROWS, len(y)
        if self._batch_norm == "batch":
            step, last = self.batch, max(1, len(y) - self.batch + 1)
        batches = (
            (self._floats(x[at : at + step]), torch.from_numpy(y[at : at + step]))
            for at in range(0, last, step)
        )
        return scores(module, self.spec.loss, batches)["accuracy"]

    @property
    def _static(self) -> bool:
        return bool(norms(self.spec.module))

    @property
    def _batch_norm(self) -> str:
        """``frozen`` or ``batch``; ``own`` where the model has none, or moving statistics."""
        return self.bn_eval if self._static else "own"

    def _training(self) -> Iterator[Tensor]:
        count = len(self.dataset.train_y)
        rows = np.arange(min(self.samples or count, count))
        for at in np.array_split(rows, max(1, -(-len(rows) // ROWS))):
            yield self._floats(self.dataset.train_x[at])

    def _floats(self, x: Array) -> Tensor:
        return torch.from_numpy(self.dataset.floats(x))

    def _facts(self, submodel: Submodel, module: nn.Sequential, artifact: Artifact) -> dict[str, Any]:
        values = list(module.parameters())
        return {
            "model": self.spec.name,
            "submodel": dict(submodel.identity),
            "parameters": sum(value.numel() for value in values),
            "nonzero": sum(int(value.count_nonzero()) for value in values),
            "macs": sum(macs_by_weight(module, self.spec.sample).values()),
            "bytes": len(artifact.model),
            "sha256": hashlib.sha256(artifact.model).hexdigest(),
            "input": {
                "name": INPUT,
                "dtype": str(self.spec.sample.dtype).removeprefix("torch."),
                "shape": [artifact.batch, *self.spec.sample.shape],
                "scale": float(self.dataset.scale),
                "shift": float(self.dataset.shift),
            },
            "output": {"name": OUTPUT, "classes": self.spec.classes},
            "batch_norm": self._batch_norm,
            "data": self.dataset.name,
            "max_rel_error": artifact.max_rel_error,
            "checked_rows": artifact.rows,
        }


def chosen(
    federation: Federation,
    spec: ModelSpec,
    *,
    tier: str | None = None,
    kind: str | None = None,
    gamma: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Submodel:
    """The submodel to deploy: as ``tier`` is cut, or of ``kind`` (default: the whole model), of any size ``gamma``.

    The options of a kind are those of the federation's tiers of that kind, as the model was trained for them;
    ``options`` override them. ConfigError if that is not one way.
    """
    if tier is not None and kind is not None:
        raise ConfigError("give either a tier, to cut as it does, or a kind, not both", tier=tier, kind=kind)
    if tier is not None and tier not in federation.tiers:
        raise ConfigError(f"no tier {tier!r}; there are: {', '.join(federation.tiers) or 'none'}", tier=tier)
    table = federation.tiers[tier] if tier else _like(federation, kind or "output_side")
    if gamma is not None and table.kind == "output_side":
        raise ConfigError(
            "kind output_side is the whole model in inference; a gamma goes with another kind", gamma=gamma
        )
    size = {} if gamma is None else {"gamma": gamma}
    table = table.model_copy(update={**size, "options": {**table.options, **(options or {})}})
    return submodel_of(spec, tier or table.kind, table)


def _like(federation: Federation, kind: str) -> TierTable:
    """A tier of this kind without a size."""
    tiers = {name: table for name, table in federation.tiers.items() if table.kind == kind}
    if kind == "output_side" or not tiers:
        return TierTable(kind=kind)
    first, *others = tiers.values()
    if any(other.options != first.options for other in others):
        raise ConfigError(
            f"the tiers {', '.join(tiers)} of kind {kind} have different options; name one of them as the tier",
            tiers=tuple(tiers),
        )
    return TierTable(kind=kind, options=first.options)

"""From a trained global model to one ONNX file of a submodel of any size, with the facts that people need to use it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from edgefl.config import Federation, TierTable, load, without_devices
from edgefl.contract.program import Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.data.dataset import Dataset
from edgefl.lab.written import CONFIG_NAME
from edgefl.models.layers.given import called
from edgefl.models.spec import ModelSpec
from edgefl.setup.bundles import data_spec
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import EVALUATION_BATCH, STATISTICS_ROWS, StatisticsRows, trains_narrow
from edgefl.setup.model import federation_model, submodel_of
from edgefl.setup.training import program_of
from edgefl.submodels.cost import macs_by_weight
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.standalone import FIRST_ROUND, scores, standalone
from edgefl.submodels.statistics import Statistics, by_batch, collect, estimable, frozen, is_norm, norms
from edgefl.submodels.structured.submodel import Structured
from edgefl.submodels.submodel import Submodel
from edgefl.system.files import write_whole
from edgefl.system.sizes import size
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.errors import ConfigError, DataError
from edgefl.wire.tensors import Array
from exporters.deploy import INPUT, OUTPUT, Artifact, deploy

CHECKED_ROWS = 64
ROWS = EVALUATION_BATCH
"""Rows at a time where that does not matter."""

BnEval = Literal["frozen", "batch", "moving"]


def checked_file(path: str | Path) -> Path:
    """Where a model is to be written; ConfigError for a name that ends in ``.json``, where the facts about it go."""
    file = Path(path)
    if file.suffix == ".json":
        raise ConfigError(
            f"{file} is where the facts about the model go; give the model another ending, like .onnx"
        )
    return file


_SHOWN = 400
"""Characters of the facts that a notebook shows."""


@dataclass(frozen=True)
class Deployment:
    """An artifact and what to know about it, in types that JSON knows."""

    artifact: Artifact
    facts: Mapping[str, Any]

    def __repr__(self) -> str:
        facts = ", ".join(
            f"{key}={value!r}" for key, value in self.facts.items() if isinstance(value, str | float | int)
        )
        return f"Deployment({size(len(self.artifact.model))}, {facts[:_SHOWN]})"

    def save(self, path: str | Path) -> Path:
        """Write the ONNX file, and beside it the facts as JSON, each whole or not at all. Gives the path.

        ConfigError for a name that ends in ``.json``, where the facts go.
        """
        file = checked_file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, self.artifact.model)
        write_whole(file.with_suffix(".json"), msgspec.json.format(msgspec.json.encode(self.facts)) + b"\n")
        return file


@dataclass(frozen=True)
class Workshop:
    """Data and rules to make every submodel of one trained model from, the same for all, so that they can be compared.

    ``bn_eval`` says what batch norms normalise with. ``frozen``: statistics of the submodel's own, estimated in one pass
    over at most ``samples`` of the server's rows (0: all; :class:`~edgefl.setup.evaluation.StatisticsRows`). Moving
    statistics (model.bn = "global") describe the sizes that were trained: the whole model keeps them, unless narrow tiers
    of ``federation`` moved them too (:func:`~edgefl.setup.evaluation.trains_narrow`). ``moving``: moving statistics in every
    size, for comparison. ``batch``: those of each batch, which depend on its size and classes (fiarse.md A11). ``batch``
    samples go through the artifact at a time. If the program of ``federation`` computes with weights in another form than
    they travel in, the submodel has that form.
    ConfigError if these do not go together.
    """

    spec: ModelSpec
    dataset: Dataset
    weights: Mapping[str, Array]
    bn_eval: BnEval = "frozen"
    batch: int = 1
    samples: int = STATISTICS_ROWS
    federation: Federation | None = None

    @classmethod
    def of(
        cls, federation: Federation, dataset: Dataset, weights: Mapping[str, Array], **options: Any
    ) -> Workshop:
        """Return the workshop of a model that ``federation`` trained; ``options`` are fields of the class."""
        spec = federation_model(federation, dataset)
        return cls(spec, dataset, weights, federation=federation, **options)

    def __post_init__(self) -> None:
        static, every = len(norms(self.spec.module)), len(norms(self.spec.module, moving=True))
        if self.bn_eval == "batch" and not every:
            raise ConfigError(
                f"{self.spec.name} has no batch norm that follows its batches: take bn-eval frozen",
                model=self.spec.name,
            )
        if self.bn_eval == "moving" and static == every:
            raise ConfigError(
                f"{self.spec.name} has no moving statistics (model.bn): take bn-eval frozen",
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
        """The artifact of ``submodel``, checked on test samples, and its facts.

        ``smaller`` may replace the finished module by one that computes the same. ModelError if the weights are not
        the model's, ExportError if the artifact does not agree with torch.
        """
        finished, source = self._finished(submodel)
        module = smaller(finished)
        rows = self._test(np.arange(min(CHECKED_ROWS, len(self.dataset.test_y))))
        artifact = deploy(module, self.spec.sample, rows, batch=self.batch)
        facts = self._facts(submodel, module, artifact) | {
            "batch_norm": source,
            **({"statistics": self._statistics_facts} if source == "frozen" else {}),
            self.metric: self.score(module),
            f"whole_{self.metric}": self.score(self.module(OutputSide(self.spec, 0))),
            "metric": self.metric,
        }
        return Deployment(artifact, facts)

    def module(self, submodel: Submodel, number: int = FIRST_ROUND) -> nn.Sequential:
        """``submodel`` on its own, in inference mode; where a window rolls, as it lies in round ``number``."""
        return self._finished(submodel, number)[0]

    @property
    def metric(self) -> str:
        """What tells how good a model of this task is: accuracy, perplexity, mae, or the loss."""
        return next(iter(self.spec.metrics), "loss")

    def score(self, module: nn.Sequential) -> float:
        """:attr:`metric` on the test set. Where the batch has a say, in full batches of the artifact's size."""
        count = len(self.dataset.test_y)
        step, last = ROWS, count
        if self.bn_eval == "batch":
            step, last = self.batch, max(1, count - self.batch + 1)
        batches = (self._test(np.arange(at, min(at + step, count))) for at in range(0, last, step))
        return scores(module, self.spec.loss, batches)[self.metric]

    @torch.inference_mode()
    def right(self, module: nn.Sequential) -> Array:
        """bool (test samples,): which of them ``module`` puts into their class."""
        rows = np.arange(len(self.dataset.test_y))
        found = [
            called(module, batch).argmax(dim=-1).eq(batch["y"]).numpy()
            for batch in map(self._test, np.split(rows, range(ROWS, len(rows), ROWS)))
        ]
        return np.concatenate(found)

    def _finished(self, submodel: Submodel, number: int = FIRST_ROUND) -> tuple[nn.Sequential, str]:
        """The module, and what its batch norms use: ``frozen``, ``batch``, ``moving`` (as trained) or ``none``."""
        made = standalone(submodel, self.weights, number)
        moving = self.bn_eval == "frozen" and (self.narrow or not self._whole(made))
        if inference := self._inference(submodel):
            made = standalone(submodel, self.weights, number, inference)
        if self.bn_eval == "batch":
            return by_batch(made), "batch"
        statistics = Statistics({}, {})
        if estimable(made, moving=moving):
            statistics = collect(made, map(self._tensors, self._rows.batches()), moving=moving)
        if statistics.sums:
            return frozen(made, statistics), "frozen"
        return made, "moving" if any(map(is_norm, made.modules())) else "none"

    @property
    def _rows(self) -> StatisticsRows:
        return StatisticsRows(self.dataset, self.samples)

    @property
    def _statistics_facts(self) -> dict[str, Any]:
        rows = self._rows
        warning = {"warning": rows.warning} if rows.warning else {}
        return {"rows": rows.count, "source": rows.source, **warning}

    @property
    def narrow(self) -> bool:
        """Return True if narrow tiers moved the statistics of the whole model."""
        return self.federation is not None and trains_narrow(self.federation)

    def _inference(self, submodel: Submodel) -> Function | None:
        """Return the form in which inference reads the weights, None if it is that in which they travel."""
        whole = OutputSide(self.spec, 0)
        if self.federation is None or program_of(self.federation, whole).inference is None:
            return None
        return program_of(self.federation, submodel).inference

    @property
    def whole(self) -> Mapping[str, Array]:
        """Return the weights of the whole model as inference reads them, with estimated statistics, by name."""
        whole = OutputSide(self.spec, 0)
        if not self.narrow and self._inference(whole) is None:
            return self.weights
        state = self.module(whole).state_dict()
        return {name: state[name].numpy() if name in state else array for name, array in self.weights.items()}

    def _whole(self, module: nn.Sequential) -> bool:
        """Whether nothing of the trained model is left out."""
        state = module.state_dict()
        return state.keys() == self.weights.keys() and all(
            np.array_equal(tensor.numpy(), self.weights[name]) for name, tensor in state.items()
        )

    @cached_property
    def _label(self) -> TensorSpec:
        """One label: to ask the model runs it."""
        return self.spec.label

    def _test(self, rows: Array) -> Tensors:
        return self._tensors(self.dataset.test_batch(rows))

    def _tensors(self, parts: Mapping[str, Array]) -> Tensors:
        """A batch, its labels in the shape that the loss reads."""
        labels = parts["y"].reshape(len(parts["y"]), *self._label.shape)
        return {name: torch.from_numpy(array) for name, array in {**parts, "y": labels}.items()}

    def _inputs(self, artifact: Artifact) -> list[dict[str, Any]]:
        """How to feed the artifact, input by input; the numbers of the first are ``x * scale + shift`` of the data's."""
        specs = {INPUT: self.spec.sample, **self.spec.others}
        scaled = {INPUT: {"scale": float(self.dataset.scale), "shift": float(self.dataset.shift)}}
        return [
            {
                "name": name,
                "dtype": str(specs[name].dtype).removeprefix("torch."),
                "shape": [artifact.batch, *specs[name].shape],
                **scaled.get(name, {}),
            }
            for name in artifact.inputs
        ]

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
            "inputs": self._inputs(artifact),
            "output": {"name": OUTPUT, "classes": self.spec.classes},
            "data": self.dataset.name,
            "max_rel_error": artifact.max_rel_error,
            "checked_rows": artifact.rows,
        }


_SIZES = frozenset({"ratio", "exit", "width", "counts"})
"""Options that say how large a tier's submodel is, in words other than gamma."""


def chosen(
    federation: Federation,
    spec: ModelSpec,
    *,
    tier: str | None = None,
    kind: str | None = None,
    gamma: float | None = None,
    options: Mapping[str, Any] | None = None,
    weights: Mapping[str, Array] | None = None,
) -> Submodel:
    """The submodel to deploy: as ``tier`` is cut, or of ``kind`` (default: the whole model), of any size ``gamma``.

    The options of a kind are those of the federation's tiers of that kind, as the model was trained for them;
    ``options`` override them. Channel counts that are not given are those of the trained ``weights``; a tier keeps the
    ones its devices trained. ConfigError if that is not one way, ModelError if the weights are not the model's.
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
    inherited = {name: value for name, value in table.options.items() if gamma is None or name not in _SIZES}
    table = table.model_copy(update={**size, "options": {**inherited, **(options or {})}})
    made = submodel_of(spec, tier or table.kind, table)
    if tier is None and weights is not None and isinstance(made, Structured) and isinstance(made.counts, str):
        standalone(made, weights)  # refuses those of another model
        return made.replanned(weights)
    return made


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


MODEL_NAME = "model.safetensors"
BUNDLES = "bundles/*.efl"


def accuracy_on_test_set(run: Path) -> dict[str, float]:
    """Share of the test set that each tier's submodel of the model in the folder ``run`` classifies rightly.

    A submodel that freezes units at the input side is the whole model on a device: such tiers are equal. Batch norm
    has the statistics that `edgefl deploy` gives it. Nothing is downloaded. OSError or an error of ours if model,
    configuration or data cannot be read, or the data here are not those of the run.
    """
    weights = tensors.load((run / MODEL_NAME).read_bytes())
    federation = without_devices(load(run / CONFIG_NAME, {}))
    here = federation.data.model_copy(update={"download": False})
    federation = federation.model_copy(update={"data": here})
    dataset = open_data(federation)
    _check_same(run, dataset, named=here.name != "auto")
    workshop = Workshop.of(federation, dataset, weights)
    spec = workshop.spec
    if workshop.metric != "accuracy":
        raise DataError(f"the run in {run} is measured by {workshop.metric}, not by accuracy", path=str(run))
    accuracies: dict[str, float] = {}
    whole: float | None = None
    for tier in federation.tiers:
        submodel = chosen(federation, spec, tier=tier, kind=None, gamma=None, options={}, weights=weights)
        if submodel.prefix and whole is not None:
            accuracies[tier] = whole
            continue
        accuracies[tier] = workshop.score(workshop.module(submodel))
        whole = accuracies[tier] if submodel.prefix else whole
    return accuracies


def _check_same(run: Path, dataset: Dataset, *, named: bool) -> None:
    """DataError unless the run's bundles were made for samples like these, or the run has none and ``named`` its data."""
    spec = next((read_bundle(path).manifest.data for path in sorted(run.glob(BUNDLES))), None)
    if spec == data_spec(dataset) or (spec is None and named):
        return
    raise DataError(
        f"the samples that are found here ({dataset.name}) are not known to be those of the run in {run}: set EDGEFL_DATA "
        "as it was for the run",
        path=str(run),
    )

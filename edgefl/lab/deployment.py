"""Deployment of a trained global model: export of a submodel of any size as one file, with its facts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch import nn

from edgefl.config import Federation, TierTable, load, without_devices
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, DataError
from edgefl.lab.facts import WeightsOrigin, describe_file
from edgefl.lab.run_folder import CONFIG_NAME, MODEL_NAME, MeasuredStatistics, measured_statistics
from edgefl.models.inputs import call_with_inputs, first_input
from edgefl.models.spec import ModelSpec
from edgefl.setup.data import open_data
from edgefl.setup.evaluation import (
    EVALUATION_BATCH,
    STATISTICS_ROWS,
    StatisticsRows,
    private_warning,
    trains_narrow,
)
from edgefl.setup.model import data_spec, federation_model, submodel_of
from edgefl.setup.training import algorithm_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.standalone import FIRST_ROUND, scores_of, standalone
from edgefl.submodels.statistics import NormStatistics, collect, estimable, freeze, is_norm, norms, use_batch
from edgefl.submodels.structured.submodel import Structured
from edgefl.submodels.submodel import Submodel
from edgefl.system.files import write_whole
from edgefl.system.sizes import size
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import read_bundle
from edgefl.wire.norm_statistics import WHOLE, tier_family
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import notebook_table
from edgefl_export.deploy.export import DeployArtifact, ExportedModel, deploy
from edgefl_export.deploy.measuring import FileMeasurement
from edgefl_export.deploy.program import INPUT, DeployModel, PreprocessingLayer, preprocessing_of
from edgefl_export.deploy.target import FACTS, SUFFIXES, DeployTarget, files_of, refuse_existing, target_of

_SIZES = frozenset({"ratio", "exit", "width", "counts"})
"""Options that give the size of a tier's submodel by other means than gamma."""


def deployed_submodel(
    federation: Federation,
    spec: ModelSpec,
    *,
    tier: str | None = None,
    kind: str | None = None,
    gamma: float | None = None,
    options: Mapping[str, Any] | None = None,
    weights: Mapping[str, Array] | None = None,
) -> Submodel:
    """Return the submodel to deploy: that of ``tier``, or one of ``kind`` and size ``gamma``, or the whole model.

    A kind takes the options of the federation's tiers of that kind, for which the model was trained. Missing channel
    counts come from the trained ``weights``; a tier keeps those of its devices.

    Args:
        federation: the federation that trained the model.
        spec: the whole model.
        tier: name of a tier of the federation; not together with ``kind``.
        kind: kind of submodel, such as ``width``; None for the whole model.
        gamma: share of the parameters.
        options: overrides of the kind's options.
        weights: the trained weights, by name.

    Returns:
        The submodel.

    Raises:
        ConfigError: if the arguments contradict each other.
        ModelError: if the weights are not the model's.
    """
    if tier is not None and kind is not None:
        raise ConfigError("give either a tier, to cut as it does, or a kind, not both", tier=tier, kind=kind)
    if tier is not None and tier not in federation.tiers:
        raise ConfigError(f"no tier {tier!r}; there are: {', '.join(federation.tiers) or 'none'}", tier=tier)
    table = federation.tiers[tier] if tier else _table_of_kind(federation, kind or "output_side")
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
        return made.replan(weights)
    return made


def _table_of_kind(federation: Federation, kind: str) -> TierTable:
    """Return the table of a tier for submodels of ``kind``, with the options of the federation's tiers of that kind,
    without a size.

    Raises:
        ConfigError: if these tiers have different options.
    """
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


CHECKED_ROWS = 64
ROWS = EVALUATION_BATCH
"""Rows of an evaluation batch."""
CALIBRATION_ROWS = 256
"""Largest number of rows that int8 ranges are measured on."""
MOST_LOST = 0.02
"""Share of accuracy that quantization may lose without a note."""

BnEval = Literal["frozen", "batch", "moving"]

_SHOWN = 400
"""Characters of the facts in a notebook."""


@dataclass(frozen=True)
class Deployment:
    """Exported file of a submodel, with its facts.

    Attributes:
        artifact: the file's content.
        facts: format, inputs, origin and accuracy of the file, as JSON types.
        target: its format and options.
    """

    artifact: DeployArtifact
    facts: Mapping[str, Any]
    target: DeployTarget = field(default_factory=DeployTarget)

    def __repr__(self) -> str:
        facts = ", ".join(
            f"{key}={value!r}" for key, value in self.facts.items() if isinstance(value, str | float | int)
        )
        return f"Deployment({size(len(self.artifact.model))}, {facts[:_SHOWN]})"

    def _repr_html_(self) -> str:
        facts = {key: value for key, value in self.facts.items() if isinstance(value, str | float | int)}
        return notebook_table(
            f"Deployment, {size(len(self.artifact.model))}",
            [{"fact": key, "value": value} for key, value in facts.items()],
        )

    def measured(self, measurement: FileMeasurement | None = None, saved: Path | None = None) -> Deployment:
        """Return a copy of this deployment with two more facts: ``latency_ms`` (median) and ``peak_bytes`` of its
        runtime here.

        Args:
            measurement: process that was started for the target; None to start one.
            saved: path of the file, if it was written already; None to write a temporary one.

        Raises:
            ExportError: if the file cannot be measured.
        """
        with TemporaryDirectory() as folder, measurement or FileMeasurement(self.target) as process:
            file = saved or self.save(Path(folder) / f"model{self._suffix}")
            return replace(self, facts={**self.facts, **process.of(file, self.facts["inputs"])})

    @property
    def _suffix(self) -> str:
        return next(suffix for suffix, each in SUFFIXES.items() if each == self.target.format)

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the file, and the facts as JSON in the same folder, each atomically. A loader is added to a .safetensors
        file.

        Args:
            path: path of the file; its suffix must fit the format.
            force: True to replace existing files.

        Returns:
            The path.

        Raises:
            ConfigError: for the suffix of another format, or if one of the files exists.
        """
        file = Path(path)
        if target_of(file).format != self.target.format:
            raise ConfigError(
                f"expected a name that ends in {self._suffix}, found {file.name!r}; the deployment was made for that format"
            )
        files = files_of(file)
        if not force:
            refuse_existing(files)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, self.artifact.model)
        self.save_facts(file)
        for loader in files[2:]:
            write_whole(loader, self.artifact.loader.encode())
        return file

    def save_facts(self, path: str | Path) -> None:
        """Write the facts as JSON beside the file ``path``. Replaces existing facts."""
        facts = msgspec.json.format(msgspec.json.encode(self.facts)) + b"\n"
        write_whole(Path(path).with_suffix(FACTS), facts)


@dataclass(frozen=True)
class DeploymentBuilder:
    """Data and rules for deploying every submodel of one trained model, equal for all sizes and therefore comparable.

    Attributes:
        spec: the whole model.
        dataset: test samples, and rows to estimate statistics on.
        weights: the trained weights, by name.
        bn_eval: source of the statistics in batch norms. ``frozen``: the submodel's own, those that devices
            ``measured``, or else estimated in one pass over at most ``samples`` of the server's rows
            (:class:`~edgefl.setup.evaluation.StatisticsRows`);
            moving statistics (model.bn = "global") describe the trained sizes, so the whole model keeps them
            unless narrow tiers moved them too (:func:`~edgefl.setup.evaluation.trains_narrow`). ``moving``:
            moving statistics in every size, for comparison. ``batch``: those of each batch, which depend on its
            size and classes (fiarse.md A11).
        batch: samples per call of the file.
        samples: rows to estimate statistics on; 0 for all.
        federation: the federation that trained the model. It is needed if narrow tiers trained statistics, or if
            its algorithm runs inference with weights in another form than it exchanges; then the submodel has
            that form.
        measured: statistics that devices measured; a submodel of their tiers gets them instead of estimated ones.

    Raises:
        ConfigError: if these are incompatible.
    """

    spec: ModelSpec
    dataset: Dataset
    weights: Mapping[str, Array]
    bn_eval: BnEval = "frozen"
    batch: int = 1
    samples: int = STATISTICS_ROWS
    federation: Federation | None = None
    measured: MeasuredStatistics | None = None

    @classmethod
    def of(
        cls, federation: Federation, dataset: Dataset, weights: Mapping[str, Array], **options: Any
    ) -> DeploymentBuilder:
        """Return the builder for the final ``weights`` of a model that ``federation`` trained on ``dataset``.

        ``options`` are further fields of the class.
        """
        spec = federation_model(federation, dataset)
        return cls(spec, dataset, weights, federation=federation, **options)

    def __post_init__(self) -> None:
        static, every = len(norms(self.spec.module)), len(norms(self.spec.module, moving=True))
        if self.bn_eval == "batch" and not every:
            raise ConfigError(
                f"{self.spec.name} has no batch norm that follows its batches: take bn-eval frozen",
                model=self.spec.name,
                bn_eval="batch",
            )
        if self.bn_eval == "moving" and static == every:
            raise ConfigError(
                f"{self.spec.name} has no moving statistics (model.bn): take bn-eval frozen",
                model=self.spec.name,
                bn_eval="moving",
            )
        if self.bn_eval == "batch" and self.batch < 2:
            raise ConfigError(
                f"bn-eval batch normalises with the statistics of a batch, found batch {self.batch}: take a larger one, "
                f"such as {ROWS}",
                batch=self.batch,
            )

    def deployment(
        self,
        submodel: Submodel,
        smaller: Callable[[nn.Sequential], nn.Sequential] = lambda module: module,
        *,
        target: DeployTarget | None = None,
        origin: WeightsOrigin | None = None,
    ) -> Deployment:
        """Export ``submodel``, compare the file with torch on test samples, and return it with its facts.

        Args:
            submodel: the part of the model to deploy.
            smaller: function that may replace the finished module by an equivalent one.
            target: format and options; None for an ONNX file with the builder's batch.
            origin: origin of the weights, for the facts.

        Raises:
            ModelError: if the weights are not the model's.
            DataError: if the dataset has no test samples.
            ExportError: if the file does not agree with torch.
        """
        if not len(self.dataset.test_y):
            raise DataError(
                "expected at least one test sample to compare the file with torch on, found none; add test_x and test_y to "
                "the data"
            )
        target = target or DeployTarget(batch=self.batch)
        finished, source = self._build(submodel)
        module = smaller(finished)
        layer = self._preprocessing(target)
        made = self._export(module, target, layer)
        judged = made
        if layer is not None and not layer.invertible:  # the server has features, and no sounds
            judged = self._export(module, replace(target, preprocessing=False), None)
        metric = self.metric
        value = self.score(judged.forward)
        quantized = target.quantize != "none"
        plain = self.score(module) if quantized else value
        whole = OutputSide(self.spec, 0)
        is_whole = dict(submodel.identity) == dict(whole.identity) and module is finished
        facts = describe_file(
            self.spec, self.dataset, self.weights, submodel, made, origin or WeightsOrigin(), module
        ) | {
            "batch_norm": source,
            **({"statistics": self._statistics_facts(submodel)} if source == "frozen" else {}),
            metric: value,
            f"whole_{metric}": plain if is_whole else self.score(self.module(whole)),
            **({f"unquantized_{metric}": plain} if quantized else {}),
            "metric": metric,
        }
        notes = [*facts.get("notes", ()), *self._notes]
        if metric == "accuracy" and plain - value > MOST_LOST:
            lost = f"{target.quantize} loses {100 * (plain - value):.1f} points of accuracy on the test set: use float16"
            notes.append(lost)
        if notes:
            facts["notes"] = notes
        artifact = made.artifact(facts)
        return Deployment(artifact, facts | self._of_file(artifact), target)

    @staticmethod
    def _of_file(artifact: DeployArtifact) -> dict[str, Any]:
        digest = hashlib.sha256(artifact.model).hexdigest()
        return {"bytes": len(artifact.model), "sha256": digest}

    def _export(
        self, module: nn.Sequential, target: DeployTarget, layer: PreprocessingLayer | None
    ) -> ExportedModel:
        inputs = {INPUT: self.spec.sample, **self.spec.others}
        subject = DeployModel(module, inputs, self.input_names, layer)
        rows = self._test(np.arange(min(CHECKED_ROWS, len(self.dataset.test_y))))
        calibration = None
        if target.quantize == "int8":
            if layer is not None and not layer.invertible:
                raise ConfigError(
                    "expected recordings to calibrate int8 with preprocessing, found features only; leave "
                    "`with_preprocessing` or `quantize` out"
                )
            batch = next(StatisticsRows(self.dataset, CALIBRATION_ROWS).batches())
            calibration = {name: torch.from_numpy(array) for name, array in batch.items() if name != "y"}
        names = {own: name for name, own in self.spec.global_names.items()}
        return deploy(subject, rows, target, calibration=calibration, names=names)

    def _preprocessing(self, target: DeployTarget) -> PreprocessingLayer | None:
        if not target.preprocessing:
            return None
        # ExecuTorch has no antialiased filter for images of any size.
        return preprocessing_of(
            data_spec(self.dataset), pixels=self.dataset.pixels, resize=target.format != "executorch"
        )

    @cached_property
    def input_names(self) -> Mapping[str, str]:
        """Names of the arguments of the user's ``forward``, by input name of the framework. Inputs without an entry keep
        theirs.
        """
        source = self.spec.source
        if source is None:
            return {}
        sample = source.request.sample
        inputs = sample if isinstance(sample, Mapping) else {INPUT: sample}
        return {INPUT: first_input(type(source.module), inputs)[0]}

    def module(self, submodel: Submodel, number: int = FIRST_ROUND) -> nn.Sequential:
        """Return ``submodel`` as a module in inference mode.

        ``number``: round for which the window of a rolling submodel is taken.
        """
        return self._build(submodel, number)[0]

    @property
    def metric(self) -> str:
        """Name of the task's main metric: accuracy, perplexity, mae, or the loss."""
        return next(iter(self.spec.metrics), "loss")

    def score(self, model: nn.Sequential | Callable[[Tensors], torch.Tensor]) -> float:
        """Return the value of :attr:`metric` on the test set.

        Args:
            model: a module, or a function from a batch (tensors by name) to outputs, such as a runner of a
                deployed file.
        """
        forward = partial(call_with_inputs, model) if isinstance(model, nn.Module) else model
        count = len(self.dataset.test_y)
        step, last = ROWS, count
        if self.bn_eval == "batch":
            step, last = self.batch, max(1, count - self.batch + 1)
        batches = (self._test(np.arange(at, min(at + step, count))) for at in range(0, last, step))
        return scores_of(forward, self.spec.loss, batches)[self.metric]

    @torch.inference_mode()
    def right(self, module: nn.Sequential) -> Array:
        """Return, for each test sample, True if ``module`` classifies it correctly: bool (test samples,)."""
        rows = np.arange(len(self.dataset.test_y))
        found = [
            call_with_inputs(module, batch).argmax(dim=-1).eq(batch["y"]).numpy()
            for batch in map(self._test, np.split(rows, range(ROWS, len(rows), ROWS)))
        ]
        return np.concatenate(found)

    def _build(self, submodel: Submodel, number: int = FIRST_ROUND) -> tuple[nn.Sequential, str]:
        """Return (module of the submodel, source of its batch norm statistics). The source is ``frozen``, ``batch``,
        ``moving`` or ``none``.
        """
        measured = self._measured_for(submodel) if self.bn_eval == "frozen" else {}
        if measured and self.measured is not None:  # the window that a rolling submodel had on the devices
            number = self.measured.trained_rounds + 1
        made = standalone(submodel, self.weights, number)
        moving = self.bn_eval == "frozen" and (self.narrow or not self._whole(made))
        if inference := self._inference(submodel):
            made = standalone(submodel, self.weights, number, inference)
        if self.bn_eval == "batch":
            return use_batch(made), "batch"
        statistics = NormStatistics({}, {})
        if measured:
            sums = {name: torch.from_numpy(array) for name, array in measured.items()}
            statistics = NormStatistics(dict.fromkeys(sums, 1), sums)
        elif estimable(made, moving=moving):
            statistics = collect(made, map(self._tensors, self._rows.batches()), moving=moving)
        if statistics.sums:
            return freeze(made, statistics), "frozen"
        return made, "moving" if any(map(is_norm, made.modules())) else "none"

    def _measured_for(self, submodel: Submodel) -> Arrays:
        """Return the statistics that devices measured for ``submodel``, by name; {} if no tier evaluated it."""
        if self.measured is None or self.federation is None:
            return {}
        found = self._measured_alike(submodel, self.measured.by_family, self.federation.tiers)
        lacking = set(estimable(standalone(submodel, self.weights), moving=False)) - found.keys()
        return {} if lacking else found  # norms that stay on the devices have none

    def _measured_alike(
        self, submodel: Submodel, known: Mapping[str, Arrays], tiers: Mapping[str, TierTable]
    ) -> Arrays:
        if isinstance(submodel, OutputSide) and WHOLE in known:
            return known[WHOLE]
        for name, table in tiers.items():
            of_tier = submodel_of(self.spec, name, table)
            is_same = dict(of_tier.identity) == dict(submodel.identity)
            own = known.get(tier_family(name), {})
            if own and (is_same or (self._is_all(of_tier) and self._is_all(submodel))):
                return own
        return {}

    def _is_all(self, submodel: Submodel) -> bool:
        return self._whole(standalone(submodel, self.weights))

    @property
    def _rows(self) -> StatisticsRows:
        return StatisticsRows(self.dataset, self.samples)

    def _statistics_facts(self, submodel: Submodel) -> dict[str, Any]:
        if self._measured_for(submodel):
            return {"source": "devices"}
        rows = self._rows
        warning = {"warning": rows.warning} if rows.warning else {}
        return {"rows": rows.count, "source": rows.source, **warning}

    @property
    def narrow(self) -> bool:
        """True if narrow tiers changed the moving statistics of the whole model."""
        return self.federation is not None and trains_narrow(self.federation)

    @cached_property
    def _algorithm(self) -> Algorithm | None:
        """Return the federation's local training of the whole model; None if the builder has no federation."""
        return None if self.federation is None else algorithm_of(self.federation, OutputSide(self.spec, 0))

    @property
    def _notes(self) -> list[str]:
        """Return the warning about tensors that the devices keep, if there are such."""
        text = "" if self._algorithm is None else private_warning(self._algorithm)
        return [text] if text else []

    def _inference(self, submodel: Submodel) -> Function | None:
        """Return the function that converts exchanged weights to inference weights; None if they are equal."""
        if self.federation is None or self._algorithm is None or self._algorithm.inference is None:
            return None
        return algorithm_of(self.federation, submodel).inference

    @property
    def whole(self) -> Mapping[str, Array]:
        """Weights of the whole model as inference reads them, by name, with estimated statistics."""
        whole = OutputSide(self.spec, 0)
        if not self.narrow and self._inference(whole) is None:
            return self.weights
        state = self.module(whole).state_dict()
        return {name: state[name].numpy() if name in state else array for name, array in self.weights.items()}

    def _whole(self, module: nn.Sequential) -> bool:
        """Return True if the module has all tensors of the trained model, unchanged."""
        state = module.state_dict()
        return state.keys() == self.weights.keys() and all(
            np.array_equal(tensor.numpy(), self.weights[name]) for name, tensor in state.items()
        )

    @cached_property
    def _label(self) -> TensorSpec:
        """Shape and dtype of one label, cached because it takes a run of the model."""
        return self.spec.label

    def _test(self, rows: Array) -> Tensors:
        return self._tensors(self.dataset.test_batch(rows))

    def _tensors(self, parts: Mapping[str, Array]) -> Tensors:
        """Return a batch as tensors by name. Its labels ``y`` get the shape that the loss needs."""
        labels = parts["y"].reshape(len(parts["y"]), *self._label.shape)
        return {name: torch.from_numpy(array) for name, array in {**parts, "y": labels}.items()}


BUNDLES = "bundles/*.efl"


def accuracy_on_test_set(run: Path) -> dict[str, float]:
    """Return the accuracy of the final model of a run on the test set, for the submodel of each tier.

    A submodel that freezes units is the whole model on a device, so such tiers are equal. Batch norms use the
    statistics of `edgefl deploy`. Nothing is downloaded.

    Args:
        run: folder of the run.

    Returns:
        Accuracy from 0 to 1 by tier.

    Raises:
        OSError: if the model or the configuration cannot be read.
        DataError: if the data on this machine are not the run's, or the metric is not accuracy.
    """
    weights = tensors.load((run / MODEL_NAME).read_bytes())
    federation = without_devices(load(run / CONFIG_NAME, {}))
    here = federation.data.model_copy(update={"download": False})
    federation = federation.model_copy(update={"data": here})
    dataset = open_data(federation)
    _check_same(run, dataset, named=here.name != "auto")
    measured = measured_statistics(run / MODEL_NAME, federation)
    builder = DeploymentBuilder.of(federation, dataset, weights, measured=measured)
    spec = builder.spec
    if builder.metric != "accuracy":
        raise DataError(f"the run in {run} is measured by {builder.metric}, not by accuracy", path=str(run))
    accuracies: dict[str, float] = {}
    whole: float | None = None
    for tier in federation.tiers:
        submodel = deployed_submodel(
            federation, spec, tier=tier, kind=None, gamma=None, options={}, weights=weights
        )
        if submodel.prefix and whole is not None:
            accuracies[tier] = whole
            continue
        accuracies[tier] = builder.score(builder.module(submodel))
        whole = accuracies[tier] if submodel.prefix else whole
    return accuracies


def _check_same(run: Path, dataset: Dataset, *, named: bool) -> None:
    """Check that ``dataset`` is the dataset of the run, by the sample descriptions in its bundles.

    Args:
        run: folder of the run.
        dataset: dataset found on this machine.
        named: True if the run names its dataset, which is enough if it has no bundles.

    Raises:
        DataError: if it is another dataset.
    """
    spec = next((read_bundle(path).manifest.data for path in sorted(run.glob(BUNDLES))), None)
    if spec == data_spec(dataset) or (spec is None and named):
        return
    raise DataError(
        f"the samples that are found here ({dataset.name}) are not known to be those of the run in {run}: set EDGEFL_DATA "
        "as it was for the run",
        path=str(run),
    )

"""Check whether a model can be trained: cut it, export it, run it on each engine, and compare it with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch import nn

from edgefl.algorithms.catalog import SGD
from edgefl.api.bundle import Bundle
from edgefl.api.check_data import samples_of
from edgefl.api.compile import compile
from edgefl.api.device import train_round
from edgefl.api.model import DataSource, Factory, Model, dataset
from edgefl.api.progress import reporting
from edgefl.api.training import CompileOptions, Target, Training, loss_of
from edgefl.comparison.torch_side import torch_step_ms
from edgefl.errors import EdgeflError, ExportError, ModelError
from edgefl.losses import LossLike
from edgefl.models.spec import ModelSpec
from edgefl.system.forks import side_by_side
from edgefl.wire.limits import check_seed
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import notebook_table
from edgefl_export.capture.graph import start_forked

STEPS = 5
"""Local steps of the round that is tried. The first one of an engine is not timed."""


@dataclass(frozen=True)
class EngineVerdict:
    """Result of the training step on one engine.

    Attributes:
        engine: name of the engine, ``onnx`` or ``executorch``.
        problem: reason why the engine cannot train the model; empty if it agrees with torch. The numbers below are
            then 0.
        nbytes: bytes of the bundle.
        step_ms: median time of a step in milliseconds.
        max_rel_error: largest difference of an output from torch's, relative to the output's largest magnitude.
    """

    engine: str
    problem: str = ""
    nbytes: int = 0
    step_ms: float = 0.0
    max_rel_error: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Result of :func:`check`.

    Attributes:
        model: name of the model.
        problem: reason why the model cannot be built, cut or trained as torch trains it; empty if it can.
        units: names of its units (stages that are never split), in order.
        parameters: number of its parameters.
        inputs: names of its inputs.
        loss: name of its loss's class.
        torch_ms: median milliseconds of a step by torch itself on one thread; 0 unless the model is an ``nn.Module``.
        engines: results of the engines that were tried, in order.
    """

    model: str
    problem: str = ""
    units: tuple[str, ...] = ()
    parameters: int = 0
    inputs: tuple[str, ...] = ()
    loss: str = ""
    torch_ms: float = 0.0
    engines: tuple[EngineVerdict, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every engine that was tried trains the model."""
        return not self.problem and all(not each.problem for each in self.engines)

    def __str__(self) -> str:
        if self.problem:
            return f"{self.model} cannot be trained: {self.problem}"
        failed = [f"not on {each.engine}: {each.problem}" for each in self.engines if each.problem]
        able = [each.engine for each in self.engines if not each.problem]
        trained = f"can be trained on {' and '.join(able)}" if able else "can be trained on no engine"
        return "; ".join([f"{self.model} {trained}, {len(self.units)} units", *failed])

    def _repr_html_(self) -> str:
        rows = [
            {
                "engine": each.engine,
                "problem": each.problem or "none",
                "step": f"{each.step_ms:.1f} ms",
                "largest error": f"{each.max_rel_error:.1e}",
            }
            for each in self.engines
        ]
        return notebook_table(str(self), rows)


def check(
    model: Model | Factory,
    *,
    data: DataSource | None = None,
    loss: LossLike | None = None,
    batch: int = 8,
    seed: int = 0,
    engines: Sequence[Target] = (),
    progress: Callable[[str], None] | None = None,
    so_far: Callable[[Verdict], None] = lambda _: None,
    processes: int = 1,
) -> Verdict:
    """Try all that a federation does with ``model``: cut it, export its training, run steps on each engine.

    A model or engine that does not work raises no error: the result has the reason as ``problem``.

    Args:
        model: a :class:`edgefl.Model`, or what it is made of: a name (``edgefl.catalog("models")``),
            ``file.py:factory``, an ``nn.Module``, a factory of one.
        data: data with the samples and classes that the model is for: a dataset or its name, or a file or folder of a
            device.
        loss: loss of the training.
        batch: rows of a step.
        seed: seed of the random samples that are trained on.
        engines: ``onnx`` and ``executorch``; by default those that are installed.
        progress: called with a text before each part; by default a line in a terminal or a notebook shows it.
        so_far: called with the verdict after each engine; the last one is returned.
        processes: number of engines that are tried at the same time, in forks of this process.

    Returns:
        A :class:`Verdict`, which prints as one sentence. If the model cannot be trained, it names the line of the
        user's code.

    Raises:
        ConfigError: the arguments contradict each other, or one has no effect.
        DataError: ``data`` are missing or damaged.

    >>> print(edgefl.check("mlp", engines=["onnx"]))
    mlp can be trained on onnx, 3 units
    """
    seed, model = check_seed(seed), Model.of(model)
    source = samples_of(data) if isinstance(data, str | Path) else dataset(data)
    with reporting(progress=progress) as report:
        report("tracing and cutting the model")
        try:
            spec = model.spec(source, loss_of(loss))
            report("training by torch")
            torch_ms = torch_step_ms(spec, batch, seed) if isinstance(model.factory, nn.Module) else 0.0
        except (ModelError, ExportError) as error:
            return Verdict(_name(model.factory), problem=error.message)
        installed: list[Target] = ["onnx", "executorch"] if find_spec("executorch") else ["onnx"]
        verdict = Verdict(
            spec.name,
            units=spec.units,
            parameters=sum(each.numel() for each in spec.module.parameters()),
            inputs=("x", *spec.others),
            loss=type(spec.loss).__name__,
            torch_ms=torch_ms,
        )
        tasks = [partial(_export, engine, spec, batch, seed) for engine in engines or installed]
        exported = side_by_side(tasks, report, processes=processes, begin=start_forked)
        for tried in (
            exported if processes == 1 else list(exported)
        ):  # steps are timed while nothing else runs
            verdict = replace(verdict, engines=(*verdict.engines, _train(tried, batch, seed, report)))
            so_far(verdict)
        return verdict


_Exported = tuple[Bundle, Arrays, float]
"""Checked bundle, weights of the model and largest error of an output."""


def _export(
    engine: Target, spec: ModelSpec, batch: int, seed: int, progress: Callable[[str], None]
) -> _Exported | EngineVerdict:
    """Export the training of the whole model for one engine.

    Return (checked bundle, initial weights, largest error of an output), or the verdict of the engine if that fails.
    """
    try:
        progress(f"exporting for {engine}")
        training = Training(algorithm=SGD(batch=batch, steps=STEPS))
        bundle = compile(spec, training=training, options=CompileOptions(target=engine))
        progress(f"comparing {engine} with torch")
        compared = bundle.verify(seed=seed)
    except EdgeflError as error:
        return _failure(engine, error)
    if not compared.ok:
        return EngineVerdict(engine, problem=str(compared))
    errors = [each for graph in compared.graphs if graph.report for each in graph.report.errors.values()]
    return Bundle(bundle.contents), bundle.initial_weights(), max(errors, default=0.0)


def _train(
    exported: _Exported | EngineVerdict, batch: int, seed: int, progress: Callable[[str], None]
) -> EngineVerdict:
    """Train one round with an exported bundle, and return the verdict of its engine.

    If ``exported`` is the verdict of a failed export, return it unchanged.
    """
    if isinstance(exported, EngineVerdict):
        return exported
    (bundle, weights, max_rel_error), times = exported, list[float]()
    progress(f"training on {bundle.format}")
    try:
        x, y, others = _samples(bundle.manifest, 2 * batch, seed)
        train_round(
            bundle, weights, {"x": x, **others}, y, seed=seed, watch=lambda step: times.append(step.step_ms)
        )
    except EdgeflError as error:
        return _failure(bundle.format, error)
    return EngineVerdict(bundle.format, "", bundle.nbytes, median(times[1:] or times), max_rel_error)


def _failure(engine: str, error: EdgeflError) -> EngineVerdict:
    told = isinstance(error, ModelError | ExportError)
    return EngineVerdict(engine, problem=error.message if told else f"its round fails: {error.message}")


def _samples(manifest: Any, rows: int, seed: int) -> tuple[Array, Array, Arrays]:
    """Return (x, y, other inputs by name): random samples that fit the manifest, ``rows`` of each."""
    from edgefl_device.profile.measure.inputs import RandomInputs

    made = RandomInputs(manifest, seed).samples(rows)
    return np.asarray(made.x), made.y, dict(made.others)


def _name(model: Factory) -> str:
    if isinstance(model, str):
        return model
    return getattr(model, "name", "") or getattr(model, "__name__", type(model).__name__)

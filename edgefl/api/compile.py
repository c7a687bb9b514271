"""Compilation of a model and its training to a bundle, and choice of a submodel that fits a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from edgefl.algorithms.activations import store_activations
from edgefl.algorithms.catalog import TCBGD
from edgefl.api.bundle import Bundle
from edgefl.api.model import DataSource, Factory, Model, dataset, sample_spec
from edgefl.api.progress import reporting
from edgefl.api.training import CompileOptions, Training, checked_argument, loss_of
from edgefl.comparison.compare import compare
from edgefl.contract.choice import SubmodelChoice, as_choice
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.objective.carrier import ThresholdCarrier
from edgefl.submodels import catalog as submodels
from edgefl.submodels.catalog import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire.mqtt.topics import checked_name
from edgefl_export import fit
from edgefl_export.compiler.algorithm import with_shorter
from edgefl_export.compiler.cache import BundleCache
from edgefl_export.compiler.compiler import Compiler, target_of
from edgefl_export.compiler.request import TierTraining
from edgefl_export.device import Device
from edgefl_export.memory.recompute import Budget
from edgefl_export.offers import Fit


def compile(
    model: Model | Factory,
    *,
    submodel: SubmodelChoice | str | None = None,
    training: Training = Training(),
    data: DataSource | None = None,
    options: CompileOptions = CompileOptions(),
    tier: str = "strong",
    exchange: str = "",
    cache: BundleCache | None = None,
    progress: Callable[[str], None] | None = None,
) -> Bundle:
    """Compile one tier's training: the submodel, its local algorithm and its codec, into graphs for a stock runtime.

    Every graph is run once in the runtime of its format and compared with torch before the bundle exists. A bundle
    that the same versions compiled before from the same arguments is read from the cache.

    Args:
        model: a :class:`edgefl.Model`, or what it is made of: a name (``edgefl.catalog("models")``),
            ``file.py:factory``, an ``nn.Module``, a factory of one.
        submodel: submodel that the tier holds and trains, such as ``edgefl.submodels.OutputSide(cut=3)``; by default
            the whole model.
        training: algorithm, codec, optimizer and loss.
        data: data with the samples and classes that the model is for: a :class:`edgefl.data.Dataset`, or what
            :func:`edgefl.federation` takes, such as ``"digits"`` or a file that :meth:`edgefl.data.Dataset.save`
            wrote.
        options: format, memory budget and variants of the graphs.
        tier: name of the tier in the bundle.
        exchange: name of the round trip to compile, for an algorithm with several in a round; "" is the main one.
        cache: storage of compiled bundles; by default the user's (`edgefl cache`).
        progress: called with a text before each graph is made; by default a line in a terminal or a notebook shows it.

    Raises:
        ConfigError: the arguments contradict each other; it names the argument or the option.
        ModelError: the model cannot be built, or not be cut so.
        ExportError: a graph cannot be made, or disagrees with torch.

    >>> half = edgefl.submodels.Width(gamma=0.5)
    >>> prox = edgefl.Training(algorithm=edgefl.algorithms.FedProx(mu=0.1))
    >>> bundle = edgefl.compile("mlp", submodel=half, training=prox, tier="half")
    >>> bundle.manifest.program, bundle.manifest.tier
    ('fedprox', 'half')
    """
    submodel = OutputSide() if submodel is None else as_choice("submodel", SubmodelChoice, submodel)
    choices = checked_argument("training", Training, training).choices
    checked_argument("options", CompileOptions, options)
    source = dataset(data)
    spec = Model.of(model).spec(source, loss_of(training.loss))

    def cut_of(model: ModelSpec) -> Submodel:
        return submodels.build(model, submodel.name, **submodel.options)

    whole = cut_of(spec)
    shorter = {length: choices.build(cut_of(compare(spec.shortened(length)))) for length in options.lengths}
    algorithm = store_activations(with_shorter(choices.build(whole), shorter), options.activations)
    trained = TierTraining(checked_name("tier", tier), whole, algorithm)
    which = trained.exchange(exchange)
    request = trained.request(
        which,
        model=spec.name,
        data=sample_spec(spec, source),
        memory_budget=_budget(options.memory_budget),
        tokenizer=source.tokenizer if source is not None else b"",
    )
    compiler = Compiler(target_of(options.target, options.outputs), cache or BundleCache.of_user())
    with reporting(progress=progress) as report:
        compiled = compiler.compile(request, report)
    return Bundle(compiled.bundle, (trained, which), compiled=not compiled.from_cache)


def _budget(amount: object) -> Budget | None:
    if not amount:
        return None
    if isinstance(amount, int):
        return Budget(float(amount))
    if not isinstance(amount, str):
        raise ConfigError(
            f'argument `memory_budget` is {amount!r}; give bytes, "64MiB" or "60%"', argument="memory_budget"
        )
    return Budget.parse(amount)


def plan(
    model: Model | Factory,
    device: Device = Device(),
    *,
    training: Training | Callable[[Submodel], Training] = Training(),
    kinds: Iterable[str] = (),
    gammas: Sequence[float] = (),
    data: DataSource | None = None,
    progress: Callable[[str], None] | None = None,
    processes: int = 1,
) -> Fit:
    """Compare all submodels of a model on a device: memory, bytes and time of a round, and the recommended one.

    Args:
        model: as in :func:`edgefl.compile`.
        device: capacity of the device; 0 is unknown.
        training: algorithm, codec, optimizer and loss of all submodels; or a function that returns the first three for
            a submodel. Without an algorithm SGD, and TCBGD for submodels of single entries.
        kinds: kinds of submodels; by default all.
        gammas: shares of the parameters; by default the paper's.
        data: dataset with the samples and classes of the model.
        progress: called with a text before each size, which takes some seconds; by default a line in a terminal or a
            notebook shows it.
        processes: sizes that are traced side by side, in forks of this process. If torch cannot compute in a fork,
            which depends on what this process has done before, they are traced here.

    Returns:
        The submodels with their figures. ``recommended()`` is the one that fits and trains the largest share of the
        model.

    Raises:
        ModelError: the model has no submodel at all. If none fits, ``recommended()`` of the result raises it.

    >>> fit = edgefl.plan("mlp", edgefl.Device(memory="64MiB"), kinds=["width"], gammas=[0.25, 1.0])
    >>> fit.recommended().kind
    'width'
    """
    whole = Training() if callable(training) else checked_argument("training", Training, training)
    trained = training if callable(training) else partial(_with_suited_algorithm, training)
    with reporting("tracing and cutting the model", progress=progress) as report:
        return fit.plan(
            Model.of(model).spec(dataset(data), loss_of(whole.loss)),
            device,
            lambda submodel: trained(submodel).choices,
            kinds=kinds,
            gammas=gammas,
            on_progress=report,
            processes=processes,
        )


def _with_suited_algorithm(training: Training, submodel: Submodel) -> Training:
    """Return ``training``; if it names no algorithm and the submodel's masks depend on thresholds, with TCBGD, which
    uses them.
    """
    if training.algorithm is None and isinstance(submodel.carrier, ThresholdCarrier):
        return replace(training, algorithm=TCBGD())
    return training

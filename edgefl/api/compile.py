"""From a model and its training to a bundle, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from edgefl.algorithms.activations import stored
from edgefl.algorithms.choices import SGD
from edgefl.api.bundle import Bundle
from edgefl.api.choices import codec_choice, loss_of
from edgefl.api.model import DataSource, Model, Sample, dataset, model_spec, sample_spec
from edgefl.codecs import catalog as codecs
from edgefl.codecs.choices import Dense
from edgefl.comparison.compare import compared
from edgefl.config.choices import Activations
from edgefl.contract.algorithm import Algorithm
from edgefl.contract.choice import AlgorithmChoice, CodecChoice, OptimizerChoice, SubmodelChoice, chosen
from edgefl.losses import LossLike
from edgefl.models.spec import ModelSpec
from edgefl.optimizers.catalog import NONE
from edgefl.submodels import catalog as submodels
from edgefl.submodels.choices import OutputSide
from edgefl.submodels.submodel import Submodel
from edgefl.wire.bundle.formats import Outputs, check_outputs
from edgefl.wire.errors import ConfigError
from edgefl.wire.mqtt.topics import checked_name
from edgefl_export.bundle.formats import check_installed, format_of
from edgefl_export.front.algorithm import coded_algorithm, with_shorter
from edgefl_export.front.cache import BundleCache
from edgefl_export.front.compile import cached
from edgefl_export.front.order import Order
from edgefl_export.front.tier import Tier
from edgefl_export.memory.recompute import Budget

Target = Literal["onnx", "executorch"]


def compile(
    model: Model,
    *,
    submodel: SubmodelChoice | str | None = None,
    loss: LossLike | None = None,
    algorithm: AlgorithmChoice | str = SGD(),
    codec: CodecChoice | AlgorithmChoice | str = Dense(),
    optimizer: OptimizerChoice | str | None = None,
    target: Target = "onnx",
    outputs: Outputs = "caller",
    memory_budget: str | int = "",
    activations: Activations = "float32",
    lengths: Sequence[int] = (),
    data: DataSource | None = None,
    sample: Sample | None = None,
    classes: int | None = None,
    options: Mapping[str, Any] | None = None,
    output: str | int | None = None,
    seed: int = 0,
    tier: str = "strong",
    exchange: str = "",
    cache: BundleCache | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Compile one tier's training: the submodel, its local algorithm and its codec, into graphs for a stock runtime.

    Every graph is run once in the runtime of its format and compared with torch before the bundle exists. What was compiled
    before, of the same things by the same versions, comes out of the cache.

    Choices are objects such as ``edgefl.submodels.OutputSide(cut=3)``, or their names where the defaults will do.

    Args:
        model: a model's name (``edgefl.catalog("models")``), ``file.py:factory``, an ``nn.Module``, a factory of one, or a
            ``ModelSpec``.
        submodel: what the tier holds and trains; by default the whole model.
        loss: what training minimises: a choice such as ``edgefl.losses.Huber(delta=2.0)``, its name, or a function of
        your own,
            ``(out, y)`` -> one loss per sample; by default the model's own, or the one that fits its output and the labels.
        algorithm: the local training; by default SGD.
        codec: how the update becomes bytes; by default float32 weights. FedBAT, which is a training too, takes the place of
            SGD.
        optimizer: the server's; by default what the algorithm says.
        target: ``onnx`` for ONNX Runtime, ``executorch`` for ExecuTorch (extra ``executorch``).
        outputs: of ExecuTorch programs: ``caller``, whoever runs them gives the memory of their outputs; ``planned``, they
            have it themselves, for apps that can only load and execute, as with ExecuTorch's ``Module`` for Android.
        memory_budget: peak of the training over the idle process, like ``"64MiB"``, ``"60%"`` or bytes: what does not fit
            is recomputed in the backward pass.
        activations: how what a step's forward pass makes waits for its backward pass: ``float16`` takes half the memory, and
            gradients read what rounding has left.
        lengths: of sequences: shorter ones that there are steps for too, so that a batch of short samples costs less.
        data: whose samples and classes the model is for: a :class:`edgefl.data.Dataset`, or what
        :func:`edgefl.federation` takes,
            such as ``"digits"`` or a file that :meth:`edgefl.data.Dataset.save` wrote.
        sample: without ``data``: the shape of one sample, without batch dimension (float32), or a ``TensorSpec``.
        classes: without ``data``: the number of classes.
        options: keyword arguments of the model's factory.
        output: which of the things that a model of your own returns is its output: a key, an attribute or a position; by
            default ``logits``, or else the first tensor of floats.
        seed: of the initial weights.
        tier: its name in the bundle.
        exchange: of an algorithm with several exchanges in a round, which one; "" is the main one.
        cache: where compiled bundles are kept; by default the user's (`edgefl cache`).
        progress: is told of each graph before it is made; of none where the bundle was in the cache.

    Raises:
        ConfigError: where the arguments do not go together; it names the argument or the option.
        ModelError: where the model cannot be built, or not be cut so.
        ExportError: where a graph cannot be made, or disagrees with torch.

    >>> half, prox = edgefl.submodels.Width(gamma=0.5), edgefl.algorithms.FedProx(mu=0.1)
    >>> bundle = edgefl.compile("mlp", submodel=half, algorithm=prox, tier="half")
    >>> bundle.manifest.program, bundle.manifest.tier
    ('fedprox', 'half')
    """
    check_outputs(outputs, [target])
    check_installed([target])
    submodel = OutputSide() if submodel is None else chosen("submodel", SubmodelChoice, submodel)
    algorithm, data = chosen("algorithm", AlgorithmChoice, algorithm), dataset(data)
    codec = codec_choice(codec)
    optimizer = None if optimizer is None else chosen("optimizer", OptimizerChoice, optimizer)
    spec = model_spec(
        model,
        data=data,
        sample=sample,
        classes=classes,
        seed=seed,
        options=options,
        loss=loss_of(loss),
        output=output,
    )

    def trained(part: Submodel) -> Algorithm:
        return coded_algorithm(
            part,
            algorithm.name,
            algorithm.options,
            codecs.build(codec.name, **codec.options),
            optimizer=optimizer.name if optimizer else NONE,
            optimizer_options=optimizer.options if optimizer else None,
        )

    def cut_of(model: ModelSpec) -> Submodel:
        return submodels.build(model, submodel.name, **submodel.options)

    cut = cut_of(spec)
    shorter = {length: trained(cut_of(compared(spec.shortened(length)))) for length in lengths}
    training = stored(with_shorter(trained(cut), shorter), activations)
    made = Tier(checked_name("tier", tier), cut, training)
    which = made.exchange(exchange)
    what = Order(
        made,
        which,
        model=spec.name,
        data=sample_spec(spec, data),
        format=format_of(target, outputs),
        memory_budget=_budget(memory_budget),
        tokenizer=data.tokenizer if data is not None else b"",
    )
    found = cached(cache or BundleCache.of_user(), what, progress)
    return Bundle(found.bundle, (made, which), found.compiled)


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

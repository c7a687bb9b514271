"""Objects for the arguments of training and compilation, and their conversion to choices of the catalogs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from edgefl.algorithms.catalog import SGD
from edgefl.codecs import catalog as codecs
from edgefl.codecs.catalog import Dense
from edgefl.config import Federation
from edgefl.config.tables import Activations
from edgefl.contract.choice import (
    AlgorithmChoice,
    CatalogEntry,
    Choice,
    CodecChoice,
    LossChoice,
    OptimizerChoice,
    as_choice,
)
from edgefl.errors import ConfigError
from edgefl.losses import LossLike
from edgefl.models import losses
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import OwnLoss
from edgefl.models.user_factory import absolute, address_of
from edgefl.optimizers.catalog import NONE
from edgefl.wire.bundle.formats import FormatName, Outputs, check_outputs
from edgefl_export.compiler.algorithm import TrainingChoices
from edgefl_export.compiler.compiler import check_installed

T = TypeVar("T")


def checked_argument(argument: str, kind: type[T], value: object) -> T:
    """Return ``value`` unchanged if it is an instance of ``kind``.

    Raises:
        ConfigError: It has another type; the text names ``argument``.
    """
    if not isinstance(value, kind):
        raise ConfigError(
            f"argument `{argument}` is {value!r}; give an edgefl.{kind.__name__}(...)", argument=argument
        )
    return value


def codec_choice(value: object) -> CodecChoice:
    """Return the codec that the argument ``codec`` names: a choice, its class, or the codec's name.

    It may also be an algorithm with a codec of its own, such as FedBAT.

    Raises:
        ConfigError: There is no such codec.
    """
    made = value() if isinstance(value, CatalogEntry) else value
    if isinstance(made, AlgorithmChoice) and made.name in codecs.CODECS:
        return CodecChoice(made.name, made.options, made.label)
    return as_choice("codec", CodecChoice, made)


def loss_of(value: LossLike | None) -> Loss | None:
    """Return the loss for the argument ``loss`` of an API function. None, which means the model's own loss, stays None.

    Args:
        value: A choice such as ``edgefl.losses.Huber(delta=2.0)``, a loss's name, a loss or its class, or a function
            ``(out, y)`` of the user.

    Raises:
        ConfigError: It is a value of another kind, an unknown name, or a class that needs arguments.
    """
    if value is None:
        return None
    if isinstance(value, CatalogEntry | LossChoice | str):
        made = as_choice("loss", LossChoice, value)
        return losses.build(made.name, **made.options)
    try:
        made_loss = value() if inspect.isclass(value) else value
    except TypeError as error:
        raise ConfigError(
            f"argument `loss` is a class that needs arguments ({error}): give an instance, such as "
            f"{getattr(value, '__name__', 'Loss')}(...)",
            argument="loss",
        ) from error
    if not isinstance(made_loss, Loss) and not callable(made_loss):
        raise ConfigError(
            f"argument `loss` is {value!r}; give a loss such as edgefl.losses.Huber(delta=2.0), its name, or a function "
            "(out, y) -> one loss per sample",
            argument="loss",
        )
    return losses.own_loss(made_loss)


def loss_choice(value: LossLike) -> LossChoice:
    """Return a loss as name and options, which a federation file can contain.

    Args:
        value: A choice such as ``edgefl.losses.Huber(delta=2.0)``, a loss's name, a loss or its class, or a function
            ``(out, y)`` of the user, whose name is its address ``file.py:function``.

    Raises:
        ConfigError: A file cannot express the loss, or another process could not load it.
    """
    if isinstance(value, CatalogEntry | LossChoice | str):
        return _sayable(as_choice("loss", LossChoice, value))
    if isinstance(value, OwnLoss):
        return LossChoice(address_of(value.function, "a loss"))
    for name, kind in losses.LOSSES.items():
        if type(value) is kind:
            parameters = inspect.signature(kind).parameters.values()
            options = {each.name: getattr(value, each.name) for each in parameters}
            given = {
                each.name: options[each.name] for each in parameters if options[each.name] != each.default
            }
            return _sayable(LossChoice(name, given))
    if not callable(value):
        raise ConfigError(
            f"argument `loss` is {value!r}, which other processes cannot load: give a loss such as "
            f"edgefl.losses.Huber(delta=2.0), "
            "its name, or a function or class at the top level of a file",
            argument="loss",
        )
    return LossChoice(address_of(value, "a loss"))


def _sayable(choice: LossChoice) -> LossChoice:
    parameters = (
        inspect.signature(losses.LOSSES[choice.name]).parameters if choice.name in losses.LOSSES else {}
    )
    for name, value in choice.options.items():
        if value is None and name in parameters and parameters[name].default is not None:
            raise ConfigError(
                f"{name} of the loss {choice.name!r} is None, which a file cannot say: give it a number that no label has, "
                "such as -1",
                option=name,
            )
    return choice


Target = FormatName


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of training; None selects the default.

    Choices are objects such as ``edgefl.algorithms.FedProx(mu=0.1)``, or their names for default options.

    Attributes:
        algorithm: The local training; by default SGD.
        codec: Encoding of the update; by default float32 weights. FedBAT, which is also a training, replaces SGD.
        optimizer: The server's optimizer; by default the algorithm's.
        loss: Loss of the training: a choice such as ``edgefl.losses.Huber(delta=2.0)``, its name, or a function
            of your own, ``(out, y)`` -> one loss per sample; by default the model's own, or the one that fits its
            output and the labels.

    Raises:
        ConfigError: A choice is not in its catalog.
    """

    algorithm: AlgorithmChoice | str | None = None
    codec: CodecChoice | AlgorithmChoice | str | None = None
    optimizer: OptimizerChoice | str | None = None
    loss: LossLike | None = None

    def __post_init__(self) -> None:
        given: dict[str, Callable[[object], Choice]] = {
            "algorithm": partial(as_choice, "algorithm", AlgorithmChoice),
            "codec": codec_choice,
            "optimizer": partial(as_choice, "optimizer", OptimizerChoice),
        }
        for name, read in given.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, read(value))

    @property
    def choices(self) -> TrainingChoices:
        """Algorithm, codec and optimizer as choices.

        Omitted ones are SGD, dense, and None: the algorithm's own server step.
        """
        algorithm = SGD() if self.algorithm is None else self.algorithm
        codec, optimizer = Dense() if self.codec is None else self.codec, self.optimizer
        assert isinstance(algorithm, AlgorithmChoice) and isinstance(codec, CodecChoice)
        assert optimizer is None or isinstance(optimizer, OptimizerChoice)
        return TrainingChoices(algorithm, codec, optimizer)

    @property
    def tables(self) -> dict[str, dict[str, object]]:
        """Tables ``loss``, ``algorithm``, ``codec`` and ``optimizer`` of a federation file, by name.

        Omitted settings have no table.

        Raises:
            ConfigError: another process could not load the loss.
        """
        tables: dict[str, dict[str, object]] = {}
        if self.loss is not None:
            loss = loss_choice(self.loss)
            tables["loss"] = {"name": absolute(loss.name), "options": dict(loss.options)}
        if isinstance(self.algorithm, AlgorithmChoice):
            tables["algorithm"] = {"name": absolute(self.algorithm.name), **self.algorithm.options}
        for name, choice in (("codec", self.codec), ("optimizer", self.optimizer)):
            if isinstance(choice, Choice):
                tables[name] = {"name": choice.name, "options": dict(choice.options)}
        return tables

    @classmethod
    def of(cls, federation: Federation) -> Training:
        """Return algorithm, codec and optimizer of a federation as a Training.

        ``loss`` is None, as the model already has it.
        """
        table, codec, optimizer = federation.algorithm, federation.codec, federation.optimizer
        return cls(
            algorithm=AlgorithmChoice(table.name, table.arguments),
            codec=CodecChoice(codec.name, codec.options),
            optimizer=None if optimizer.name == NONE else OptimizerChoice(optimizer.name, optimizer.options),
        )


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Format, memory budget and variants of a bundle's graphs.

    Attributes:
        target: ``onnx`` for ONNX Runtime, ``executorch`` for ExecuTorch (extra ``executorch``).
        outputs: Memory of the outputs of ExecuTorch programs. ``caller``: the caller provides it. ``planned``:
            the program provides it, for apps that can only load and execute, as with ExecuTorch's ``Module`` for
            Android.
        memory_budget: Peak of the training above the idle process, like ``"64MiB"``, ``"60%"`` or bytes. Values
            that do not fit are recomputed in the backward pass.
        activations: Type in which values of the forward pass are stored for the backward pass. ``float16`` takes
            half the memory, and gradients read the rounded values.
        lengths: Shorter lengths of sequences with training steps of their own, so that a batch of short samples
            costs less.

    Raises:
        ConfigError: The options contradict each other, or the extra is not installed.
    """

    target: Target = "onnx"
    outputs: Outputs = "caller"
    memory_budget: str | int = ""
    activations: Activations = "float32"
    lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_outputs(self.outputs, [self.target])
        check_installed([self.target])

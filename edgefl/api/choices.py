"""Read arguments as choices of the catalogs."""

from __future__ import annotations

import inspect
from typing import TypeVar

from edgefl.codecs import catalog as codecs
from edgefl.contract.choice import AlgorithmChoice, CodecChoice, LossChoice, Named, chosen
from edgefl.errors import ConfigError
from edgefl.losses import LossLike
from edgefl.models import losses
from edgefl.models.losses.loss import Loss
from edgefl.models.losses.own import OwnLoss
from edgefl.models.user_factory import address_of

T = TypeVar("T")


def checked_argument(argument: str, kind: type[T], value: object) -> T:
    """Return ``value``. ConfigError, naming the argument, unless it is of ``kind``."""
    if not isinstance(value, kind):
        raise ConfigError(
            f"argument `{argument}` is {value!r}; give an edgefl.{kind.__name__}(...)", argument=argument
        )
    return value


def codec_choice(value: object) -> CodecChoice:
    """The codec that the argument ``codec`` names; an algorithm that is a codec of its own, too, such as FedBAT."""
    made = value() if isinstance(value, Named) else value
    if isinstance(made, AlgorithmChoice) and made.name in codecs.CODECS:
        return CodecChoice(made.name, made.options, made.label)
    return chosen("codec", CodecChoice, made)


def loss_of(value: LossLike | None) -> Loss | None:
    """The loss that the argument ``loss`` names; None: the model's own."""
    if value is None:
        return None
    if isinstance(value, Named | LossChoice | str):
        made = chosen("loss", LossChoice, value)
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
    """The same as a federation file has it. ConfigError for what another process could not load, or a file not say."""
    if isinstance(value, Named | LossChoice | str):
        return _sayable(chosen("loss", LossChoice, value))
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

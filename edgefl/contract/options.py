"""Checks of options and hyper-parameters from files and command lines."""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from edgefl.errors import ConfigError


def check_options(
    what: str, factory: Callable[..., Any], options: Mapping[str, object], *, upon: int = 1
) -> None:
    """Check options against the signature of the function that takes them.

    A factory with ``**options`` accepts everything.

    Args:
        what: Name of the thing that has the options, for the error text.
        factory: Function with the options as keyword parameters.
        options: Values by name.
        upon: Number of the factory's first parameters that are not options.

    Raises:
        ConfigError: An option is unknown, or its value does not have the annotated type.
    """
    parameters = inspect.signature(factory).parameters
    accepted = list(parameters)[upon:]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ConfigError(
            f"{what} has no option {unknown[0]!r}; it takes {', '.join(accepted)}",
            unknown=unknown,
            accepted=accepted,
        )
    hints = typing.get_type_hints(factory)
    for name, value in options.items():
        try:
            msgspec.convert(value, hints.get(name, Any))
        except msgspec.ValidationError as error:
            raise ConfigError(f"option {name!r} of {what} is {value!r}: {error}", option=name) from error


def check_above_zero(what: str, **values: float) -> None:
    """Raise ConfigError unless each of ``values``, options of ``what`` by name, is finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            _refuse(what, name, value, "a finite number above 0")


def check_not_negative(what: str, **values: float) -> None:
    """Raise ConfigError unless each of ``values``, options of ``what`` by name, is finite and at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            _refuse(what, name, value, "a finite number of at least 0")


def check_below_one(what: str, **values: float) -> None:
    """Raise ConfigError unless each of ``values``, options of ``what`` by name, lies in [0, 1), as the decay of a
    moving mean.
    """
    for name, value in values.items():
        if not 0 <= value < 1:
            _refuse(what, name, value, "a number in [0, 1)")


def check_counts(what: str, **values: int) -> None:
    """Raise ConfigError unless each of ``values``, options of ``what`` by name, is an int of at least 1."""
    for name, value in values.items():
        if not (isinstance(value, int) and value >= 1):
            _refuse(what, name, value, "a whole number of at least 1")


def _refuse(what: str, name: str, value: float, wanted: str) -> None:
    raise ConfigError(f"{what}: {name} is {value!r}; set it to {wanted}", option=name, value=value)

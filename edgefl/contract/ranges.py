"""Hyper-parameters held against their ranges, in one voice."""

from __future__ import annotations

import math

from edgefl.errors import ConfigError


def above_zero(what: str, **values: float) -> None:
    """ConfigError, naming ``what`` has the option, unless each of ``values`` is finite and above 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            _refuse(what, name, value, "a finite number above 0")


def at_least_zero(what: str, **values: float) -> None:
    """ConfigError unless each of ``values`` is finite and at least 0."""
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            _refuse(what, name, value, "a finite number of at least 0")


def below_one(what: str, **values: float) -> None:
    """ConfigError unless each of ``values`` lies in [0, 1): weights on the past, as of a moving mean."""
    for name, value in values.items():
        if not 0 <= value < 1:
            _refuse(what, name, value, "a number in [0, 1)")


def counts(what: str, **values: int) -> None:
    """ConfigError unless each of ``values`` is a whole number of at least 1."""
    for name, value in values.items():
        if not (isinstance(value, int) and value >= 1):
            _refuse(what, name, value, "a whole number of at least 1")


def _refuse(what: str, name: str, value: float, wanted: str) -> None:
    raise ConfigError(f"{what}: {name} is {value!r}; set it to {wanted}", option=name, value=value)

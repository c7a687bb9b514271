"""Options that people write into files and command lines, held against the function that takes them."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from edgefl.errors import ConfigError


def check_options(
    what: str, factory: Callable[..., Any], options: Mapping[str, object], *, upon: int = 1
) -> None:
    """ConfigError, naming ``what`` takes them, for an option that ``factory`` has not or that is of another type.

    The first ``upon`` parameters of the factory are the things that are built upon and no options.
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

"""The optimizers of a server by name, as federation files have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edgefl.contract.algorithm import Algorithm
from edgefl.contract.options import check_options
from edgefl.contract.server import MEAN, ServerOpt
from edgefl.errors import ConfigError
from edgefl.facts.combinations import combination_error
from edgefl.optimizers.adaptive import fedadagrad, fedadam, fedams, fedyogi
from edgefl.optimizers.momentum import server_momentum

OPTIMIZERS: Mapping[str, Callable[..., ServerOpt]] = {
    "fedadam": fedadam,
    "fedyogi": fedyogi,
    "fedadagrad": fedadagrad,
    "fedams": fedams,
    "server_momentum": server_momentum,
}
NONE = "none"
"""In a federation file: what the algorithm has, which is the mean unless it has its own."""


def build(name: str, **options: Any) -> ServerOpt:
    """The optimizer ``name``. ConfigError, with what exists, for a wrong name or option, or a value out of range."""
    factory = OPTIMIZERS.get(name)
    if factory is None:
        known = ", ".join((NONE, *OPTIMIZERS))
        raise ConfigError(f"no optimizer {name!r}; there are: {known}", name=name, known=known)
    check_options(f"optimizer {name!r}", factory, options, upon=0)
    return factory(**options)


def with_optimizer(algorithm: Algorithm, name: str, **options: Any) -> Algorithm:
    """``algorithm`` with the optimizer ``name`` at the server; ``none`` leaves it as it is.

    ConfigError for an algorithm that says itself what the server does, or that has several exchanges.
    """
    if name == NONE:
        if options:
            raise ConfigError(
                f"optimizer 'none' takes no options, found {', '.join(options)}; choose an optimizer",
                options=sorted(options),
            )
        return algorithm
    optimizer = build(name, **options)
    if algorithm.server is not MEAN or len(algorithm.exchanges) > 1:
        raise combination_error(
            f"algorithm {algorithm.name!r} has a server's step of its own, {algorithm.server.name!r}; leave out optimizer "
            f"{name!r}, or choose an algorithm that the server averages, such as fedavg",
            algorithm=algorithm.name,
            optimizer=name,
        )
    return replace(algorithm, server=optimizer)

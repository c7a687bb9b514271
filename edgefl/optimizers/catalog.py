"""Optimizers of the server by name, as federation files have them, and as objects with options: ``FedAdam(lr=0.01)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from edgefl.contract.algorithm import Algorithm
from edgefl.contract.choice import OptimizerChoice, collect_factories, define_plain
from edgefl.contract.options import check_options
from edgefl.contract.server import MEAN, ServerOpt
from edgefl.errors import ConfigError
from edgefl.facts.combinations import combination_error
from edgefl.optimizers.server import fedadagrad, fedadam, fedams, fedyogi, server_momentum

FedAdam = define_plain(OptimizerChoice, "fedadam", "FedAdam", fedadam)
FedYogi = define_plain(OptimizerChoice, "fedyogi", "FedYogi", fedyogi)
FedAdagrad = define_plain(OptimizerChoice, "fedadagrad", "FedAdagrad", fedadagrad)
FedAMS = define_plain(OptimizerChoice, "fedams", "FedAMS", fedams)
ServerMomentum = define_plain(OptimizerChoice, "server_momentum", "ServerMomentum", server_momentum)

OPTIMIZERS: Mapping[str, Callable[..., ServerOpt]] = collect_factories(globals())
NONE = "none"
"""Name in a federation file for the algorithm's own server step, which is the mean by default."""


def build(name: str, **options: Any) -> ServerOpt:
    """Return the server optimizer with the name ``name``, a key of :data:`OPTIMIZERS`, and these options.

    Raises:
        ConfigError: The name, an option or a value is wrong. The text lists what is accepted.
    """
    factory = OPTIMIZERS.get(name)
    if factory is None:
        known = ", ".join((NONE, *OPTIMIZERS))
        raise ConfigError(f"no optimizer {name!r}; there are: {known}", name=name, known=known)
    check_options(f"optimizer {name!r}", factory, options, upon=0)
    return factory(**options)


def with_optimizer(algorithm: Algorithm, name: str, **options: Any) -> Algorithm:
    """Return a copy of ``algorithm`` with the server optimizer ``name`` and these options.

    For the name ``none``, return ``algorithm`` itself.

    Raises:
        ConfigError: The name or an option is wrong, or the algorithm has a server step of its own or several exchanges
            (round trips) in a round.
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

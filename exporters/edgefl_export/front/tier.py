"""A tier as the compiler takes it: a submodel and the algorithm that trains it, exchange by exchange."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.submodel import Submodel
from edgefl_export.bundle.build import Prefix
from edgefl_export.front.algorithm import state_read

FORWARD_BATCH = 32
"""Rows per group in a frozen forward pass (EmbracingFL Algorithm 1, b)."""


@dataclass(frozen=True)
class Exchange:
    """One exchange of a method. ``name`` is what files and people call it, "" the main one; ``reads`` names what devices
    get of the server's state."""

    name: str
    algorithm: Algorithm
    reads: tuple[str, ...]


def exchanges_of(method: Algorithm) -> tuple[Exchange, ...]:
    """All exchanges of a method, in the order in which they first come; the main one is the last."""
    names = exchange_names(len(method.opening), len(method.ahead))
    return tuple(
        Exchange(name, algorithm, state_read(algorithm, method.server_state))
        for name, algorithm in zip(names, method.exchanges, strict=True)
    )


def exchange_names(opening: int, ahead: int) -> tuple[str, ...]:
    """What the exchanges of a method are called that has so many before its main one."""
    return (*_numbered("opening", opening), *_numbered("ahead", ahead), "")


def _numbered(word: str, count: int) -> list[str]:
    return [word] if count == 1 else [f"{word}-{number}" for number in range(1, count + 1)]


@dataclass(frozen=True)
class Tier:
    """``algorithm`` trains ``submodel``; what is compiled of it is told apart by ``name``."""

    name: str
    submodel: Submodel
    algorithm: Algorithm

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Those of :func:`exchanges_of` the algorithm."""
        return exchanges_of(self.algorithm)

    @property
    def main(self) -> Exchange:
        """The exchange that a method of one has in every round."""
        return self.exchanges[-1]

    def exchange(self, name: str) -> Exchange:
        """The exchange of that name; ConfigError if the algorithm has none."""
        for exchange in self.exchanges:
            if exchange.name == name:
                return exchange
        names = ", ".join(repr(exchange.name) for exchange in self.exchanges)
        raise ConfigError(
            f"algorithm {self.algorithm.name!r} has no exchange {name!r}, but {names}",
            algorithm=self.algorithm.name,
            exchange=name,
        )

    @cached_property
    def prefix(self) -> tuple[Prefix, ...]:
        """The frozen chunks, each with the function that runs it forward."""
        return tuple(
            Prefix(chunk.units, chunk_forward(chunk.module, chunk.sample, batch=FORWARD_BATCH))
            for chunk in self.submodel.prefix
        )

    def fetched(self, exchange: Exchange) -> tuple[str, ...]:
        """Names under which the weights to train are published (units that tiers share, or the tier's own payload), and
        the state of the server that the exchange reads."""
        return fetched(self.submodel, self.name, exchange.reads)


def fetched(submodel: Submodel, tier: str, reads: tuple[str, ...] = ()) -> tuple[str, ...]:
    """See :meth:`Tier.fetched`."""
    if not submodel.units:
        own = f"{tier}/submodel"
        return (own, *(f"{own}/{name}" for name in reads))
    return (*submodel.units, *server_state.units_of(reads, submodel.units, trained_names(submodel.spec)))


def trained_names(spec: ModelSpec) -> tuple[str, ...]:
    """The parameters that gradients move: each has a place in the server's state."""
    named = spec.module.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in named if parameter.requires_grad)

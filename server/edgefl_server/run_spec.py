"""Everything the service needs to know about a run, as plain data: composed from a federation file, or by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from edgefl.contract import server_state
from edgefl.contract.server import MEAN, Schedule, ServerOpt, constant
from edgefl.wire.blobs import Compression
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.limits import Limits
from edgefl.wire.regions import Placement, Region, extract
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE, Form
from edgefl_server.aggregate.robust import MEAN as MEAN_RULE
from edgefl_server.aggregate.robust import MeanRule
from edgefl_server.coordinator.collapse import NEVER, Rollback
from edgefl_server.coordinator.states import Outcome, Rules
from edgefl_server.round_aggregation import UpdateLayout

Evaluate = Callable[[Arrays], Mapping[str, float]]
"""Metrics of a global model by name, ``loss`` among them."""


Count = Literal["holders", "nonzero"]
"""Whom an entry is averaged over: all updates that hold it, or only those that changed it."""


Encoding = Literal["float32", "float16", "int8"]
"""How trained tensors travel to the devices."""


Place = Callable[[Arrays, int], Placement]
"""A tier's share of the global weights in a round, counted from 1 (:meth:`edgefl.submodels.submodel.Submodel.place`)."""


@dataclass(frozen=True)
class FixedPlacement:
    """Placement with the same entries in every round. ``payload``: devices get them under the tier's own name."""

    regions: Mapping[str, Region]
    payload: bool = False

    def __call__(self, weights: Arrays, number: int) -> Placement:
        return Placement(self.regions, extract(weights, self.regions) if self.payload else {})


def steady(place: Place, weights: Arrays, *, moves: bool) -> Place:
    """Return a fixed placement, or ``place`` itself if its entries move between rounds or need a further payload."""
    if moves:
        return place
    placed = place(weights, 1)
    found = FixedPlacement(placed.regions, bool(placed.payload))
    again = found(weights, 1).payload
    alike = again.keys() == placed.payload.keys() and not placed.masks
    alike = alike and all(np.array_equal(array, placed.payload[name]) for name, array in again.items())
    return found if alike else place


@dataclass(frozen=True)
class TierSpec:
    """Settings of a tier: its bundle, its share of each round's weights, and the form of its updates.

    ``bundle`` is the one that the server reads itself, ``further`` are the same in other formats: devices take the one
    that their engine runs. If its share has a payload, the bundle's ``suffix`` begins with the name under which it is
    published. ``reads``: the server's states that its devices get; of a payload, state ``m`` is published as
    ``<name>/m``. ``sends``: what its updates hold, states by name and the weights as "".
    """

    bundle: BundleArchive
    place: Place
    form: Form = DENSE
    reads: tuple[str, ...] = ()
    sends: tuple[str, ...] = (server_state.WEIGHTS,)
    further: tuple[BundleArchive, ...] = ()

    @property
    def bundles(self) -> Mapping[str, BundleArchive]:
        """The tier's bundles by format."""
        return {each.manifest.format: each for each in (self.bundle, *self.further)}

    @property
    def published(self) -> str:
        """The name of the first thing that it trains: a unit of the model, or its payload."""
        return self.bundle.manifest.suffix[0]

    @property
    def mask_bits(self) -> int:
        """Most bits that the masks of an update may unfold to."""
        manifest = self.bundle.manifest
        return sum(port.mask for port in manifest.graph(manifest.finish).outputs_of("update"))


@dataclass(frozen=True)
class ExchangeSpec:
    """One exchange of a method: programs and settings of the devices, and the server step on their averages."""

    tiers: Mapping[str, TierSpec]
    hyper: Mapping[str, float]
    schedule: Schedule = constant
    server: ServerOpt = MEAN

    def update_layout(self, tier: str, placement: Placement, trained: frozenset[str]) -> UpdateLayout:
        """Return the layout of the updates of a tier that has this placement."""
        spec = self.tiers[tier]
        averaged = server_state.states_given(self.server, spec.sends, sorted(trained))
        return UpdateLayout(
            spec.form,
            spec.bundle.manifest,
            spec.mask_bits,
            server_state.regions_of(placement, spec.sends, trained),
            server_state.regions_of(placement, averaged, trained),
            self.server.unfolds,
        )


@dataclass(frozen=True)
class DownlinkSpec:
    """Settings of the downlink (:mod:`edgefl_server.publish.downlink`).

    ``compression`` is for every blob but manifests. ``mirrors``: URLs that serve the blobs, too; ``mirrors_only``: and
    not at the broker. ``mirror_folder``: where the server writes them to, "" for ``mirror`` in its own folder, if there
    are ``mirrors``.
    """

    encoding: Encoding = "float32"
    keyframe_every: int = 10
    compression: Compression = "zstd"
    mirrors: tuple[str, ...] = ()
    mirrors_only: bool = False
    mirror_folder: str = ""


@dataclass(frozen=True)
class AggregateSpec:
    """Settings of the aggregation (:class:`edgefl_server.aggregate.aggregator.Aggregator`).

    ``clip_norm`` and ``clip_statistics`` (units of :mod:`edgefl_server.aggregate.statistics`) 0: no limit.
    """

    rule: MeanRule = MEAN_RULE
    clip_norm: float = 0.0
    clip_statistics: float = 0.0
    threads: int = 0


@dataclass(frozen=True)
class RunSpec:
    """One run of a federation. ``digest`` names the configuration: a run is resumed under the same one only.

    ``initial`` holds float tensors by global name, each below one of ``units``; ``trained`` names its trainable
    parameters, the others (moving statistics) travel as they are. ``server_state`` names what the server keeps beside
    the model, which is part of both. ``opening`` are exchanges that come once, before all others; those of ``ahead``
    and the main one (``tiers``, ``hyper``, ``schedule``, ``server``) follow each other in turn. ``rules.run`` is filled
    in by the service. ``count`` selects the updates that an entry averages
    (:class:`edgefl_server.aggregate.aggregator.Aggregator`). ``evaluate`` is called every ``evaluate_every`` rounds (0:
    never) and after the last one; ``metric`` names the number of it that people are shown first. With a rule for
    ``rollback`` each round is evaluated before it counts.
    """

    federation: str
    digest: str
    rules: Rules
    tiers: Mapping[str, TierSpec]
    units: tuple[str, ...]
    initial: Arrays
    hyper: Mapping[str, float]
    lr_decay_at: tuple[float, ...] = ()
    schedule: Schedule = constant
    server: ServerOpt = MEAN
    opening: tuple[ExchangeSpec, ...] = ()
    ahead: tuple[ExchangeSpec, ...] = ()
    server_state: tuple[str, ...] = ()
    count: Count = "holders"
    trained: frozenset[str] = frozenset()
    aggregate: AggregateSpec = AggregateSpec()
    rollback: Rollback = NEVER
    downlink: DownlinkSpec = DownlinkSpec()
    evaluate: Evaluate | None = None
    metric: str = "accuracy"
    caveat: str = ""
    """Why the evaluation is not to be relied on; "" if it is."""
    evaluate_every: int = 1
    limits: Limits = Limits()
    keep_updates: bool = False
    """Whether the bytes of all updates stay in the run's folder, for a replay."""
    message_limit: int = 0
    """Bytes of the largest message that the broker is known to take; 0: nothing is known."""

    @property
    def main(self) -> ExchangeSpec:
        """The exchange that a method of one has in every round."""
        return ExchangeSpec(self.tiers, self.hyper, self.schedule, self.server)

    @property
    def exchanges(self) -> tuple[ExchangeSpec, ...]:
        """All of them, in the order in which they first come."""
        return (*self.opening, *self.ahead, self.main)

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Return the memory of the largest round by tier, over its formats."""
        tiers = [item for exchange in self.exchanges for item in exchange.tiers.items()]
        return {
            name: max(
                each.manifest.planned_bytes
                for known, tier in tiers
                if known == name
                for each in tier.bundles.values()
            )
            for name in dict(tiers)
        }

    def next_main(self, position: int) -> int:
        """Return the first position from ``position`` on that has the main exchange."""
        while self.index(position) != len(self.exchanges) - 1:
            position += 1
        return position

    def exchange(self, position: int) -> ExchangeSpec:
        """Return the exchange that follows ``position`` completed ones."""
        return self.exchanges[self.index(position)]

    def index(self, position: int) -> int:
        """Return the index in :attr:`exchanges` for ``position``."""
        first = len(self.opening)
        return position if position < first else first + (position - first) % (1 + len(self.ahead))

    def hyper_at(self, number: int, position: int) -> dict[str, float]:
        """Return the scalars of round ``number`` (from 1), for which ``position`` exchanges were completed.

        ``lr`` is divided by 10 at each fraction of ``lr_decay_at`` that has passed.
        """
        exchange = self.exchange(position)
        rounds = self.rules.rounds
        decays = sum(1 for fraction in self.lr_decay_at if number - 1 >= fraction * rounds - 1e-9)
        scaled = {"lr": exchange.hyper["lr"] / 10.0**decays} if "lr" in exchange.hyper else {}
        return {**exchange.hyper, **scaled, **exchange.schedule(position, rounds)}

    def model_of(self, arrays: Arrays) -> Arrays:
        """Return the model's own tensors, without the server's state."""
        return server_state.model_of(arrays, self.server_state) if self.server_state else arrays

    def evaluates(self, number: int, outcome: Outcome) -> bool:
        """Return True if the model after round ``number`` is to be evaluated."""
        if self.evaluate is None or self.evaluate_every == 0:
            return False
        last = number == self.rules.rounds
        return last or (outcome == "closed" and number % self.evaluate_every == 0)

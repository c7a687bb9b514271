"""Run spec: all settings and functions that the service needs for a run, composed from a federation file or by a test."""

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
from edgefl.wire.statistics import StatisticsRequest
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.form import DENSE, Form
from edgefl_server.aggregate.robust import MEAN as MEAN_RULE
from edgefl_server.aggregate.robust import RobustRule
from edgefl_server.coordinator.collapse import NEVER, RollbackRule
from edgefl_server.coordinator.states import EVALUATION, MEASURING, Outcome, Rules
from edgefl_server.norm_statistics import NO_NORMS, NormFamilies
from edgefl_server.round_aggregation import UpdateLayout

Evaluate = Callable[[Arrays], Mapping[str, float]]
"""Function from the weights of a global model to its metrics by name, including ``loss``."""


Count = Literal["holders", "nonzero"]
"""Updates that an entry averages: all that hold it, or only those that changed it."""


Encoding = Literal["float32", "float16", "int8"]
"""Encoding of trained tensors in the downlink."""


Place = Callable[[Arrays, int], Placement]
"""Function from the global weights and a round number (from 1) to a tier's share of the weights in that round
(:meth:`edgefl.submodels.submodel.Submodel.place`)."""


@dataclass(frozen=True)
class FixedPlacement:
    """Function that returns the same share of the global tensors for a tier in every round.

    Attributes:
        regions: Positions of the tier's tensors in the global model.
        payload: True to copy their values into the placement, so that they are published under the tier's own name.
    """

    regions: Mapping[str, Region]
    payload: bool = False

    def __call__(self, weights: Arrays, number: int) -> Placement:
        return Placement(self.regions, extract(weights, self.regions) if self.payload else {})


def steady(place: Place, weights: Arrays, *, moves: bool) -> Place:
    """Return a :class:`FixedPlacement` that gives the same results as ``place``, or ``place`` itself if that is not
    possible.

    It is not possible if the entries change between rounds (``moves``), or if the payload has masks or other arrays.
    ``weights`` are the initial weights, with which both are compared.
    """
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
    """Settings of a tier in one exchange (round trip) of the algorithm.

    Attributes:
        bundle: Bundle that the server reads.
        place: Function that returns the tier's share of the weights for a round. If the share has a payload, the
            bundle's ``suffix`` begins with the name under which it is published.
        form: Encoding of its updates.
        reads: States of the server that its devices receive. State ``m`` of a payload is published as ``<name>/m``.
        sends: Contents of its updates: names of states, and "" for the weights.
        further: The same bundle in other formats. Devices take the one that their engine runs.
        private: Names of the tensors that its devices keep (:attr:`edgefl.contract.algorithm.Algorithm.private`).
    """

    bundle: BundleArchive
    place: Place
    form: Form = DENSE
    reads: tuple[str, ...] = ()
    sends: tuple[str, ...] = (server_state.WEIGHTS,)
    further: tuple[BundleArchive, ...] = ()
    private: frozenset[str] = frozenset()

    @property
    def bundles(self) -> Mapping[str, BundleArchive]:
        """Bundles of the tier, by format."""
        return {each.manifest.format: each for each in (self.bundle, *self.further)}

    @property
    def published(self) -> str:
        """Name under which the server publishes the first part that the tier trains: a unit (stage) of the model, or
        the tier's own payload.

        Empty if the tier's devices receive no weights.
        """
        return next(iter(self.bundle.manifest.suffix), "")

    @property
    def mask_bits(self) -> int:
        """Largest number of bits that the masks (bits of the kept entries) of an update may have, over all its
        tensors.
        """
        manifest = self.bundle.manifest
        return sum(port.mask for port in manifest.graph(manifest.finish).outputs_of("update"))


@dataclass(frozen=True)
class ExchangeSpec:
    """Settings of one exchange of an algorithm: a round trip of model and updates, which takes one round.

    Attributes:
        tiers: Settings by tier.
        hyper: Scalars that are announced to the devices.
        schedule: Function that returns the scalars that change from round to round.
        server: Optimizer of the server, applied to the average.
    """

    tiers: Mapping[str, TierSpec]
    hyper: Mapping[str, float]
    schedule: Schedule = constant
    server: ServerOpt = MEAN

    def update_layout(self, tier: str, placement: Placement, trained: frozenset[str]) -> UpdateLayout:
        """Return the layout of the updates of ``tier``: encoding, size limits, and positions in the global model.

        ``placement`` is the tier's share of the global tensors in the round. ``trained`` names the trainable
        parameters.
        """
        spec = self.tiers[tier]
        averaged = server_state.unfolded_states(self.server, spec.sends, sorted(trained))
        return UpdateLayout(
            spec.form,
            spec.bundle.manifest,
            spec.mask_bits,
            server_state.regions_of(placement, spec.sends, trained, spec.private),
            server_state.regions_of(placement, averaged, trained, spec.private),
            self.server.unfolds,
        )


@dataclass(frozen=True)
class DownlinkSpec:
    """Settings of the downlink (:mod:`edgefl_server.publish.downlink`).

    Attributes:
        encoding: Encoding of the weights.
        keyframe_every: Rounds between two keyframes, with int8.
        compression: Compression of all blobs except manifests.
        mirrors: URLs that serve the blobs besides the broker.
        mirrors_only: True if the broker has no blobs.
        mirror_folder: Folder that the server writes blobs to; empty for ``mirror`` in the run's folder, if there
            are mirrors.
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

    Attributes:
        rule: Rule that combines the updates.
        clip_norm: Largest L2 norm of a change; 0 for no limit.
        clip_statistics: Bound of moving statistics in units of :mod:`edgefl_server.aggregate.statistics`; 0 for
            no limit.
        threads: Number of cores; 0 for all.
    """

    rule: RobustRule = MEAN_RULE
    clip_norm: float = 0.0
    clip_statistics: float = 0.0
    threads: int = 0


@dataclass(frozen=True)
class RunSpec:
    """Specification of one run of a federation.

    Attributes:
        federation: Name of the federation.
        digest: Digest of the configuration. A run is resumed under the same digest only.
        rules: Rules of the coordinator. The service sets ``rules.run``.
        tiers: Tiers in the main exchange, as ``hyper``, ``schedule`` and ``server`` are its settings.
        units: Names of the model's units.
        initial: Initial tensors, float, by global name; each name begins with one of ``units``.
        hyper: Scalars of the main exchange.
        lr_decay_at: Fractions of the run at which ``lr`` is divided by 10.
        schedule: Schedule of the main exchange.
        server: Server optimizer of the main exchange.
        opening: Exchanges that happen once, before all others.
        ahead: Exchanges that alternate with the main one, before it.
        evaluation: Exchange in which devices evaluate the model on their held-out rows. None: there is none.
        measuring: Exchange in which devices measure the statistics of batch norm before an evaluation. None: the
            statistics of training are used.
        norms: Names of the batch norm statistics that ``measuring`` gives.
        least_group: Number of devices below which a group is left out of the results of an evaluation round.
        statistics: Request for statistics of the devices' data, which ``evaluation`` sums up instead of metrics. None:
            it evaluates the model.
        server_state: Names of the states that the server keeps besides the model; their tensors are part of
            ``initial``.
        count: Updates that an entry averages (:class:`edgefl_server.aggregate.aggregator.Aggregator`).
        trained: Trainable parameters. Other tensors, such as moving statistics, are sent unrounded.
        aggregate: Settings of the aggregation.
        rollback: Rollback rule. With one, each round is evaluated before it counts.
        downlink: Settings of the downlink.
        evaluate: Function that returns the metrics of a model; None: the server evaluates no model.
        metric: Metric that people are shown first.
        evaluate_every: Rounds between evaluations; 0 for none. Otherwise the last round is always evaluated.
        limits: Limits of the federation.
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
    evaluation: ExchangeSpec | None = None
    measuring: ExchangeSpec | None = None
    norms: NormFamilies = NO_NORMS
    least_group: int = 1
    statistics: StatisticsRequest | None = None
    server_state: tuple[str, ...] = ()
    count: Count = "holders"
    trained: frozenset[str] = frozenset()
    aggregate: AggregateSpec = AggregateSpec()
    rollback: RollbackRule = NEVER
    downlink: DownlinkSpec = DownlinkSpec()
    evaluate: Evaluate | None = None
    metric: str = "accuracy"
    caveat: str = ""
    """Reason why the evaluation is unreliable; empty if it is reliable."""
    evaluate_every: int = 1
    limits: Limits = Limits()
    keep_updates: bool = False
    """True to keep the bytes of all updates in the run's folder, for a replay."""
    message_limit: int = 0
    """Largest message in bytes that the broker is known to accept; 0 if unknown."""

    @property
    def main(self) -> ExchangeSpec:
        """Settings of the main exchange (round trip). An algorithm with a single exchange has it in every round."""
        return ExchangeSpec(self.tiers, self.hyper, self.schedule, self.server)

    @property
    def exchanges(self) -> tuple[ExchangeSpec, ...]:
        """All exchanges (round trips) of the algorithm, in the order in which they first happen; the main one is the
        last.
        """
        return (*self.opening, *self.ahead, self.main)

    @property
    def private(self) -> frozenset[str]:
        """Names of the tensors that devices keep. The server's model has their initial values in every round."""
        tiers = (tier for exchange in self.exchanges for tier in exchange.tiers.values())
        return frozenset[str]().union(*(tier.private for tier in tiers))

    @property
    def offered(self) -> tuple[ExchangeSpec, ...]:
        """Exchanges whose bundles devices download: those of training, then those of evaluation and of measuring."""
        return (*self.exchanges, *(each for each in (self.evaluation, self.measuring) if each is not None))

    @property
    def planned_bytes(self) -> dict[str, int]:
        """Planned memory in bytes of each tier's largest graph, by tier, over all exchanges (round trips) and formats."""
        tiers = [item for exchange in self.offered for item in exchange.tiers.items()]
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
        """Return the first position (number of completed exchanges) from ``position`` on after which the main exchange
        follows.

        An exchange is a round trip of the algorithm.
        """
        while self.index(position) != len(self.exchanges) - 1:
            position += 1
        return position

    def exchange(self, position: int) -> ExchangeSpec:
        """Return the exchange (round trip of the algorithm) that follows after ``position`` completed exchanges.

        The positions :data:`~edgefl_server.coordinator.states.EVALUATION` and ``MEASURING`` return the exchange for
        evaluation or for measuring.
        """
        return self.offered[self.index(position)]

    def index(self, position: int) -> int:
        """Return the index in :attr:`offered` of the exchange that :meth:`exchange` returns for ``position``."""
        if position in (EVALUATION, MEASURING):
            return len(self.exchanges) + (position == MEASURING)
        first = len(self.opening)
        return position if position < first else first + (position - first) % (1 + len(self.ahead))

    def model_of(self, arrays: Arrays) -> Arrays:
        """Return ``arrays`` without the tensors of the server's state."""
        return server_state.model_of(arrays, self.server_state) if self.server_state else arrays

    def evaluates(self, number: int, outcome: Outcome) -> bool:
        """Return True if the server must evaluate the model after round ``number``, which ended with ``outcome``."""
        if self.evaluate is None or self.evaluate_every == 0 or self.rules.is_evaluation(number):
            return False
        trained = self.rules.trained_rounds(number)
        last = trained == self.rules.rounds
        return last or (outcome == "closed" and trained % self.evaluate_every == 0)

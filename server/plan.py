"""Everything the service needs to know about a run, as plain data: composed from a federation file, or by a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from edgefl.codecs.form import DENSE, Form
from edgefl.submodels.submodel import Placement
from edgefl.wire.bundle import Bundle
from edgefl.wire.compression import Compression
from edgefl.wire.limits import Limits
from edgefl.wire.tensors import Arrays
from server.coordinator import Outcome, Rules
from server.robust import MEAN, Rule

Evaluate = Callable[[Arrays], Mapping[str, float]]
"""Metrics of a global model; ``accuracy`` and ``loss`` are shown to people."""


Count = Literal["holders", "nonzero"]
"""Whom an entry is averaged over: all updates that hold it, or only those that changed it."""


Encoding = Literal["float32", "float16", "int8"]
"""How trained tensors travel to the devices."""


Place = Callable[[Arrays, int], Placement]
"""A tier's share of the global weights in a round, counted from 1 (:meth:`edgefl.submodels.submodel.Submodel.place`)."""


@dataclass(frozen=True)
class TierPlan:
    """What a tier downloads, its share of each round's weights, and what the bytes of its updates mean.

    If that has a payload, the bundle's ``suffix`` is one name, and the payload is published under it.
    """

    bundle: Bundle
    place: Place
    form: Form = DENSE

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
class DownlinkPlan:
    """How weights travel to the devices (:mod:`server.downlink`). ``compression`` is for every blob but manifests."""

    encoding: Encoding = "float32"
    keyframe_every: int = 10
    compression: Compression = "zstd"


@dataclass(frozen=True)
class AggregatePlan:
    """How the updates of a round become one change (:class:`server.aggregator.Aggregator`); ``clip_norm`` 0: no limit."""

    rule: Rule = MEAN
    clip_norm: float = 0.0
    threads: int = 0


@dataclass(frozen=True)
class Plan:
    """One run of a federation. ``digest`` names the configuration: a run is resumed under the same one only.

    ``initial`` holds float tensors by global name, each below one of ``units``; ``trained`` names its trainable
    parameters, the others (moving statistics) travel as they are. ``rules.run`` is filled in by the service. ``count``
    says whom an entry is averaged over (:class:`server.aggregator.Aggregator`). ``evaluate`` is called every
    ``evaluate_every`` rounds (0: never) and after the last one.
    """

    federation: str
    digest: str
    rules: Rules
    tiers: Mapping[str, TierPlan]
    units: tuple[str, ...]
    initial: Arrays
    hyper: Mapping[str, float]
    lr_decay_at: tuple[float, ...] = ()
    late: Mapping[str, float] = field(default_factory=dict)
    count: Count = "holders"
    trained: frozenset[str] = frozenset()
    aggregate: AggregatePlan = AggregatePlan()
    downlink: DownlinkPlan = DownlinkPlan()
    evaluate: Evaluate | None = None
    evaluate_every: int = 1
    limits: Limits = Limits()  # noqa: RUF009  frozen

    def hyper_at(self, number: int) -> dict[str, float]:
        """Scalars of round ``number`` (from 1).

        ``lr`` is divided by 10 at each fraction of ``lr_decay_at`` that has passed, those of ``late`` are 0 until theirs.
        """
        decays = sum(1 for fraction in self.lr_decay_at if self._passed(fraction, number))
        scaled = {"lr": self.hyper["lr"] / 10.0**decays} if "lr" in self.hyper else {}
        waiting = {name: 0.0 for name, fraction in self.late.items() if not self._passed(fraction, number)}
        return {**self.hyper, **scaled, **waiting}

    def _passed(self, fraction: float, number: int) -> bool:
        return number - 1 >= fraction * self.rules.rounds - 1e-9

    def evaluates(self, number: int, outcome: Outcome) -> bool:
        """Whether the model after round ``number`` is to be evaluated."""
        if self.evaluate is None or self.evaluate_every == 0:
            return False
        last = number == self.rules.rounds
        return last or (outcome == "closed" and number % self.evaluate_every == 0)

"""Costs of a round with each submodel on a device, and the recommended submodel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edgefl.errors import ModelError
from edgefl.submodels.catalog import SubmodelSize
from edgefl.system.sizes import mebibytes

DEAD = "dead at the initial weights"


class SubmodelOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Submodel and the cost of a round with it on a device.

    Attributes:
        kind: kind of the submodel, such as ``width``.
        size: text that names the size within the kind.
        options: options that make this submodel.
        memory_bytes: predicted peak of anonymous memory above the idle agent.
        memory_graph: name of the graph that reaches the peak.
        parameters: number of parameters that the submodel trains.
        parameter_share: ``parameters`` over those of the whole model.
        macs: multiply-accumulates of the trained part's forward pass for one sample, as executed.
        kept_macs: the part of ``macs`` with weights that the submodel holds; the rest multiplies zeros.
        mac_share: ``kept_macs`` over those of the whole model.
        prefix_macs: multiply-accumulates of the frozen units for one sample.
        round_macs: multiply-accumulates of a whole round.
        download_bytes: bytes that a device receives in a round.
        upload_bytes: bytes that a device sends in a round.
        transfer_s: seconds of the transfers; None if no link's rate is known.
        compute_s: seconds of computing; None if the device's speed is unknown.
        trained_share: geometric mean of ``parameter_share`` and ``mac_share``.
        problem: limit of the device that the submodel exceeds; empty if it fits.
        note: remarks for people.
        dead: reason why the submodel cannot learn from the initial weights (fiarse.md, invariant 31); empty if it can.
        memory_about: ``memory_bytes`` was interpolated from other sizes instead of traced.
    """

    kind: str
    size: str
    options: dict[str, Any]
    memory_bytes: int
    memory_graph: str
    parameters: int
    parameter_share: float
    macs: int
    kept_macs: int
    mac_share: float
    prefix_macs: int
    round_macs: int
    download_bytes: int
    upload_bytes: int
    transfer_s: float | None
    compute_s: float | None
    trained_share: float
    problem: str = ""
    note: str = ""
    dead: str = ""
    memory_about: bool = False

    @property
    def too_much_memory(self) -> bool:
        return "memory" in self.problem

    @property
    def seconds(self) -> float:
        return (self.transfer_s or 0.0) + (self.compute_s or 0.0)


@dataclass(frozen=True, repr=False)
class Fit:
    """Offers of all submodels of a model for one device. ``str()`` gives one line for each offer.

    Attributes:
        offers: the offers, in the order of the kinds.
        left_out: sizes for which no submodel can be made, each with the error that explains it.
    """

    offers: tuple[SubmodelOffer, ...]
    left_out: tuple[tuple[SubmodelSize, ModelError], ...] = field(default=())

    @property
    def fitting(self) -> tuple[SubmodelOffer, ...]:
        return tuple(offer for offer in self.offers if not offer.problem)

    @property
    def able(self) -> tuple[SubmodelOffer, ...]:
        """Offers that fit the device and can learn from the initial weights."""
        return tuple(offer for offer in self.fitting if not offer.dead)

    def recommended(self) -> SubmodelOffer:
        """Return the offer with the largest ``trained_share`` among those that fit and can learn.

        Among equals it is the one that transfers the fewest bytes. ``trained_share`` combines the share of parameters,
        which measures how much of the model the device can change, with the share of multiplications, which measures
        how much of the computation takes part. The first alone would favour a cut that trains only the large last
        layers, the second one that trains the many positions of the first layers.

        Raises:
            ModelError: if no offer fits and can learn; it names the offer nearest to that and its needs.
        """
        if not self.able:
            raise _nothing_fits(self.offers)
        return max(self.able, key=_rank)

    def __repr__(self) -> str:
        return f"Fit({len(self.offers)} submodels, {len(self.fitting)} fit)"

    def __str__(self) -> str:
        lines = [
            f"{offer.kind}, {offer.size}: {offer.parameter_share:.1%} of the parameters, {mebibytes(offer.memory_bytes)}, "
            f"{offer.download_bytes:,} bytes down, {offer.upload_bytes:,} up; {offer.problem or offer.dead or 'fits'}"
            for offer in self.offers
        ]
        return "\n".join([*lines, f"recommended: {self.reason()}" if self.able else "nothing fits"])

    def reason(self) -> str:
        """Return a sentence that explains the choice of :meth:`recommended`.

        Raises:
            ModelError: if no offer fits and can learn.
        """
        best = self.recommended()
        others = sorted((offer for offer in self.able if offer is not best), key=_rank, reverse=True)
        summary = (
            f"{best.kind}, {best.size}: trains {best.parameter_share:.1%} of the parameters and "
            f"{best.mac_share:.1%} of the multiplications in {mebibytes(best.memory_bytes)}"
        )
        trains = " and train" if len(self.able) < len(self.fitting) else ""
        if not others:
            return f"{summary}; nothing else fits{trains and ' and trains'}"
        second = others[0]
        return (
            f"{summary}; of {len(self.able)} that fit{trains}, none trains more (next: {second.kind}, {second.size}, "
            f"with {second.parameter_share:.1%} and {second.mac_share:.1%})"
        )


def _rank(offer: SubmodelOffer) -> tuple[float, int, int]:
    return round(offer.trained_share, 6), -(offer.download_bytes + offer.upload_bytes), -offer.memory_bytes


def _nothing_fits(offers: Sequence[SubmodelOffer]) -> ModelError:
    """Return the error for offers of which none fits. It names the quickest whose memory fits, else the smallest."""
    alive = [offer for offer in offers if not offer.dead]
    if not alive:
        return _all_dead(offers)
    candidates = [offer for offer in alive if not offer.too_much_memory]
    if candidates:
        wanted = min(candidates, key=lambda offer: offer.seconds)
        which = "quickest" if len(candidates) == len(alive) else "quickest whose memory fits"
        remedy = f"it needs {wanted.seconds:.1f} s per round: allow that, or faster links"
    else:
        wanted, which = min(alive, key=lambda offer: offer.memory_bytes), "smallest"
        remedy = "Give it that much, a smaller batch, or a smaller model"
    able = "" if len(alive) == len(offers) else " that would train"
    told = f"the {which}, {wanted.kind} with {wanted.size}, {wanted.problem}. {remedy}"
    values = {"memory_bytes": wanted.memory_bytes, "seconds": wanted.seconds}
    return ModelError(
        f"no submodel{able} fits the device: {told}", kind=wanted.kind, size=wanted.size, **values
    )


def _all_dead(offers: Sequence[SubmodelOffer]) -> ModelError:
    largest = max(offers, key=_rank)
    return ModelError(
        f"no submodel would train: even {largest.kind} with {largest.size} is {DEAD}: {largest.dead}. "
        "Choose a larger gamma, or another kind",
        kind=largest.kind,
        size=largest.size,
    )

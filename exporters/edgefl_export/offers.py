"""Costs of a round with each submodel on a device, and the recommended submodel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from edgefl.errors import ModelError
from edgefl.submodels.catalog import Size
from edgefl.system.sizes import mebibytes

DEAD = "dead at the initial weights"


class SubmodelOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Submodel and the cost of a round with it on a device.

    Memory is anonymous memory above the idle agent at the peak of a round, predicted from the graph that needs most.
    ``memory_about``: interpolated from other sizes, far from the device's memory. MACs count one sample's forward
    pass through the trained part (``macs`` executed, ``kept_macs`` with held weights); ``round_macs`` is the total
    of a round. Shares are of the whole model; ``trained_share`` is the geometric mean of the two. Seconds
    follow from known links and speed, and are null otherwise. ``problem`` is empty if the submodel fits. ``dead`` is empty
    if it can learn; else it names the part of invariant 31 of fiarse.md that the initial weights violate.
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
    """Every submodel that exists, in the order of the kinds, and the sizes that do not, with the reason.

    Printed, a line for each.
    """

    offers: tuple[SubmodelOffer, ...]
    left_out: tuple[tuple[Size, ModelError], ...] = field(default=())

    @property
    def fitting(self) -> tuple[SubmodelOffer, ...]:
        return tuple(offer for offer in self.offers if not offer.problem)

    @property
    def able(self) -> tuple[SubmodelOffer, ...]:
        """Offers that fit and can learn."""
        return tuple(offer for offer in self.fitting if not offer.dead)

    def recommended(self) -> SubmodelOffer:
        """Return the offer that trains most of the model among those that fit; of equals the one that moves the fewest
        bytes.

        "Most" is the geometric mean of the shares of parameters and of multiplications (with held weights). The first
        measures how much of the model the device can change, the second how much of the computation takes part. Either alone
        would favour a cut that trains only the large last layers, or the many positions of the first ones. A dead one would
        train nothing, and is never taken.

        Raises ModelError, with the smallest submodel and its needs, if none is left.
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
        """Return a text with the reason for :meth:`recommended`."""
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
    """Return the error that names the nearest to fitting: the quickest of those whose memory fits, else the smallest."""
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

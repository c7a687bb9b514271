"""Width slices of any model: a part of the channels of every layer (HeteroFL, FedRolex and FjORD's tiers).

Which dimensions are channels, and which of them must be cut alike, is found from the operations that the model runs
(:mod:`edgefl.submodels.channels`); the input, the classes and the positions of images and sequences stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from torch import nn

from edgefl.models.spec import ModelSpec
from edgefl.submodels.channels.axes import Atom, atoms
from edgefl.submodels.channels.narrow import channels_of, fitted
from edgefl.submodels.channels.selection import (
    Selection,
    leading,
    regions,
    rolling,
)
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.ordered import WIDTHS, Narrower, narrower, ordered
from edgefl.submodels.width.scaled import scaler
from edgefl.submodels.width.uncut import check_share
from edgefl.submodels.width.view import View
from edgefl.wire.errors import ModelError
from edgefl.wire.regions import Placement, Region, extract
from edgefl.wire.tensors import Array

Rounding = Literal["ceil", "floor"]
# Floats fall just short of, or just over, the product that was meant: 0.29 * 100 is 29, 0.7 * 10 is 7.
_TOLERANCE = 1e-9
# Tensors that an error tells about; it carries them all.
_TOLD = 4


@dataclass(frozen=True, eq=False)
class Width(Submodel):
    """``ratio`` of the channels of each layer of ``spec``, trained as a smaller model of the same kind.

    A dimension of C channels keeps ``max(1, round(ratio * C))`` of them, rounded up (fiarse.md 3) or, for ``floor``,
    down (embracingfl.md 5): the first ones, or with ``rolling`` those of FedRolex's window, the channels ``(t + q) mod
    C`` in round t + 1. Where a dimension is made of heads times entries, or groups times channels, the entries of each
    head and the channels of each group are cut.

    ``scaler`` divides the hidden layers by ``ratio`` in training (HeteroFL). ``widths``, if there are any, are trained in
    turn, drawn in each step: those below ``ratio``, and ``ratio`` itself (FjORD). Inference and transport know of neither.
    """

    kind = "width"
    spec: ModelSpec
    ratio: float
    rounding: Rounding = "ceil"
    rolling: bool = False
    scaler: bool = False
    widths: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ModelError(f"a width ratio lies in (0, 1], found {self.ratio}", ratio=self.ratio)
        if self.rounding not in ("ceil", "floor"):
            raise ModelError(
                f"a width is rounded 'ceil' or 'floor', found {self.rounding!r}", rounding=self.rounding
            )
        if self.ratio < 1.0:
            self._check_cut()
        if self.widths and (self.rolling or self.scaler):
            other = "rolling" if self.rolling else "scaler"
            raise ModelError(
                f"ordered dropout drops the last channels of a fixed order, as they are: it does not go with {other}; "
                "leave one of the two off",
                other=other,
            )

    @classmethod
    def of_gamma(
        cls, spec: ModelSpec, gamma: float, rounding: Rounding = "ceil", *, rolling: bool = False
    ) -> Width:
        """The slice of about ``gamma`` of the parameters: ratio sqrt(gamma) (fiarse.md 2.10)."""
        if not 0.0 < gamma <= 1.0:
            raise ModelError(f"gamma lies in (0, 1], found {gamma}", gamma=gamma)
        return cls(spec, math.sqrt(gamma), rounding, rolling)

    @cached_property
    def carrier(self) -> View | None:
        """The slice's tensors travel as they are; training may see them otherwise."""
        if self.widths:
            parts = [self._narrower(ratio) for ratio in narrower(self.ratio, self.widths)]
            return ordered(self.spec, self.suffix, self.regions(), parts) if parts else None
        return scaler(self.suffix, self.ratio, self._hidden) if self.scaler and self.ratio < 1.0 else None

    @property
    def moves(self) -> bool:
        return self.rolling

    @property
    def identity(self) -> Mapping[str, object]:
        trained = {"scaler": self.scaler, "widths": list(self.widths)}
        return {"kind": self.kind, "ratio": self.ratio, "rounding": self.rounding} | trained

    @property
    def suffix(self) -> nn.Sequential:
        return self._made[1]

    @cached_property
    def counts(self) -> Mapping[Atom, int]:
        """How many indices of each group stay."""
        return self._made[0]

    def selection(self, number: int = 1) -> Selection:
        """The indices that are held in round ``number``, counted from 1."""
        return rolling(self.counts, number - 1) if self.rolling else leading(self.counts)

    def regions(self, number: int = 1) -> Mapping[str, Region]:
        """Per state tensor, the part that is held in round ``number``."""
        return regions(channels_of(self.spec), self.selection(number))

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        own_regions = self.regions(number)
        return Placement(own_regions, extract(weights, own_regions))

    def keep(self, size: int) -> int:
        """How many of ``size`` channels stay."""
        return _kept(self.ratio, size, self.rounding)

    def _narrower(self, ratio: float) -> Narrower:
        part = replace(self, ratio=ratio, widths=())
        return Narrower(ratio, part.regions(), part.suffix)

    def _hidden(self, name: str, dim: int) -> bool:
        axis = channels_of(self.spec).axes[name][dim]
        return any(atom in self.counts for atom in atoms(axis))

    @cached_property
    def _made(self) -> tuple[Mapping[Atom, int], nn.Sequential]:
        """The counts and the model that they leave."""
        try:
            return fitted(self.spec, channels_of(self.spec), self.keep)
        except ModelError as refused:
            raise ModelError(
                f"{self.spec.name} cannot be cut to {self.ratio:g} of its width: {refused.message}. Code must take sizes "
                "from its tensors (x.shape, weight.shape, -1), not from numbers that it was built with",
                **{"model": self.spec.name, "ratio": self.ratio} | refused.details,
            ) from refused

    def _check_cut(self) -> None:
        channels = channels_of(self.spec)
        widest = max((math.prod(atom.size for atom in run) for run in channels.runs), default=0)
        if not widest:
            reasons = {name: channels.why_whole(name) for name in channels.axes}
            reason_text = "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:_TOLD])
            raise ModelError(
                f"nothing in {self.spec.name} can be cut by width ({reason_text}). A model with a hidden layer can; tiers "
                "of kind output_side or importance fit any model",
                model=self.spec.name,
                reasons=reasons,
            )
        check_share(self.spec.name, channels, self.ratio, partial(_kept, rounding=self.rounding))
        if self.ratio * widest < 1 - _TOLERANCE:
            raise ModelError(
                f"no slice of {self.spec.name} is as narrow as {self.ratio:g}: its widest layer has {widest} channels "
                f"and keeps at least one of them; the smallest ratio is {1 / widest:.4g} (gamma {widest**-2.0:.4g})",
                model=self.spec.name,
                ratio=self.ratio,
                smallest=1 / widest,
            )


def _kept(ratio: float, size: int, rounding: Rounding) -> int:
    exact = ratio * size
    rounded = math.ceil(exact - _TOLERANCE) if rounding == "ceil" else math.floor(exact + _TOLERANCE)
    return min(size, max(1, rounded))


def width(
    spec: ModelSpec,
    *,
    ratio: float | None = None,
    gamma: float | None = None,
    rounding: Rounding = "ceil",
    rolling: bool = False,
    scaler: bool = False,
    ordered: bool = False,
    widths: Sequence[float] = WIDTHS,
) -> Width:
    """The slice of ``ratio`` of the channels, or of about ``gamma`` of the parameters; all without either (HeteroFL, Diao et
    al. 2021; fiarse.md 3).

    ``rounding`` of the number of channels is ``ceil`` or ``floor``. ``rolling``: the window of channels moves on by one in
    each round (FedRolex, Alam et al. 2022). ``scaler`` is HeteroFL's. ``ordered`` is FjORD's dropout (Horvath et al. 2021):
    each step trains one of ``widths`` (ratios of channels). ModelError where these do not go together, or a layer cannot be
    cut.
    """
    if ratio is not None and gamma is not None:
        raise ModelError(
            f"a width slice takes either ratio or gamma, found ratio={ratio} and gamma={gamma}",
            ratio=ratio,
            gamma=gamma,
        )
    if ratio is None:
        ratio = Width.of_gamma(spec, 1.0 if gamma is None else gamma).ratio
    if ordered:
        narrower(ratio, widths)  # which refuses wrong ones, and none at all
    part = Width(spec, ratio, rounding, rolling, scaler, tuple(widths) if ordered else ())
    _ = part.carrier  # which may refuse the model
    return part

"""Width slices of any model: a part of the channels of every layer (HeteroFL, FedRolex and FjORD's tiers).

A trace of the model's operations finds the channel dimensions, and those that must be cut alike
(:mod:`edgefl.submodels.channels`). The input, the classes and the positions of images and sequences stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.objective.carrier import WholeCarrier
from edgefl.submodels.channels.axes import Atom, atoms
from edgefl.submodels.channels.narrow import channels_of, fit_cut
from edgefl.submodels.channels.selection import (
    Channels,
    Selection,
    count_elements,
    counts,
    leading,
    regions,
    rolling,
)
from edgefl.submodels.submodel import Submodel
from edgefl.submodels.width.ordered import WIDTHS, NestedWidth, make_ordered_dropout, widths_below
from edgefl.wire.regions import Placement, Region, extract
from edgefl.wire.tensors import Array

# Width slices far above their gamma, because operations hold channels that no rule can cut.

Keep: TypeAlias = Callable[[float, int], int]
"""(ratio, size): number of kept channels out of ``size``."""
_Stuck: TypeAlias = Mapping[str, Mapping[Atom, int]]

# Reasons of dimensions that are whole in any smaller model, because they are not a layer's width.
_MEANT = (
    "the model's input", "the model's output", "nothing reads it", "positions", "rows are looked up",
    "entries are looked up", "entries are taken by their number", "padding",
)  # fmt: skip


def check_share(model: str, channels: Channels, ratio: float, keep: Keep) -> None:
    """Raise ModelError if channels that no rule can cut make the slice of ``ratio`` far too large.

    The error names the operations and the smallest gamma that works.

    Args:
        model: Name of the model, for the error text.
        channels: Structure of its dimensions.
        ratio: Share of the channels of each layer.
        keep: Function (ratio, size) that returns the number of kept channels out of ``size``.
    """
    stuck = _find_stuck(channels)
    if not stuck or not _is_bloated(channels, stuck, ratio, keep):
        return
    selection = leading(counts(channels, partial(keep, ratio)))
    every = count_elements(channels, {})
    share = count_elements(channels, selection) / every
    smallest = count_elements(channels, leading(counts(channels, lambda _: 1))) / every
    largest = sorted(stuck, key=lambda name: -count_elements(channels, selection, [name]))
    reasons = {name: _counts_text(stuck[name]) for name in largest}
    reason_text = "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:_NAMED])
    fits = _smallest_gamma(channels, stuck, ratio, keep)
    raise ModelError(
        f"a slice of {model} of gamma {ratio**2:.4g} would keep {100 * share:.1f} % of its entries, for there are "
        f"channels that no rule can cut ({reason_text}). The smallest gamma that fits is {fits:.2g}; at any, at least "
        f"{100 * smallest:.1f} % stays. Tiers of kind output_side or importance fit any model",
        model=model,
        gamma=ratio**2,
        share=share,
        smallest=smallest,
        fits=fits,
        reasons=reasons,
    )


def _find_stuck(channels: Channels) -> _Stuck:
    """Return the atoms (groups of channels) that no rule can cut, with their dimension, by the name of the state tensor."""
    stuck: dict[str, Mapping[Atom, int]] = {}
    for name, axes in channels.axes.items():
        own = {atom: dim for dim, axis in enumerate(axes) for atom in atoms(axis) if _is_stuck(atom)}
        if own:
            stuck[name] = own
    return stuck


def _is_stuck(atom: Atom) -> bool:
    """Return True if an atom (group of channels) is kept whole only because no rule can cut it."""
    return atom.reason is not None and not atom.reason.startswith(_MEANT)


def _counts_text(own: Mapping[Atom, int]) -> str:
    return ", ".join(
        f"{atom.size} entries of dimension {dim} because of {atom.reason}" for atom, dim in own.items()
    )


def _is_bloated(channels: Channels, stuck: _Stuck, ratio: float, keep: Keep) -> bool:
    """Return True if the slice is far larger than it would be if the ``stuck`` channels, which no rule can cut, were
    cut.

    Tensors with these channels must also be more than half of the slice.

    Args:
        channels: Structure of the model's dimensions.
        stuck: Result of :func:`_find_stuck`.
        ratio: Share of the channels of each layer.
        keep: Function (ratio, size) that returns the number of kept channels out of ``size``.
    """
    selection = leading(counts(channels, partial(keep, ratio)))
    freed = leading({atom: keep(ratio, atom.size) for own in stuck.values() for atom in own})
    every, slice_size = count_elements(channels, {}), count_elements(channels, selection)
    meant = max(ratio**2, count_elements(channels, {**selection, **freed}) / every)
    # Twice as much as was meant or, where that is much already, more than halfway to the whole model.
    is_large = slice_size / every > min(2 * meant, (1 + meant) / 2)
    return is_large and 2 * count_elements(channels, selection, list(stuck)) > slice_size


def _smallest_gamma(channels: Channels, stuck: _Stuck, ratio: float, keep: Keep) -> float:
    """Return the smallest gamma above ``ratio``^2, in hundredths, whose slice is not far too large (:func:`_is_bloated`).

    If there is none, return 1, the whole model.
    """
    tried = (number / 100 for number in range(math.floor(100 * ratio**2) + 1, 100))
    return next((gamma for gamma in tried if not _is_bloated(channels, stuck, math.sqrt(gamma), keep)), 1.0)


# HeteroFL's scaler: a narrow model's layers have the magnitude of the whole model's (fiarse.md 3, 2.9).

Hidden = Callable[[str, int], bool]
"""Function that returns True if a dimension of a state tensor holds channels that a width cuts."""


@dataclass(frozen=True, eq=False)
class ScalingCarrier(WholeCarrier):
    """Carrier that divides the output of each hidden convolution and dense layer by ``ratio`` (HeteroFL).

    The layers of a narrow model then have the magnitude of the whole model's (fiarse.md 3, 2.9). Inference divides as
    training does: the layers behind were trained on the divided outputs, and moving statistics describe these. Weight and
    bias are divided, which is the same, because the layers are linear. The scale comes before a norm that follows, as in
    HeteroFL.

    A layer is hidden if a width may cut its outputs. Classes cannot be cut, so the classifier is unchanged.
    """

    ratio: float
    divided: frozenset[str]

    @classmethod
    def of(cls, module: nn.Sequential, ratio: float, hidden: Hidden) -> ScalingCarrier:
        """Return the carrier (conversion between sent tensors and weights) of the tensors of ``module``.

        Args:
            module: Modules of the narrow model.
            ratio: Number by which the outputs of hidden layers are divided.
            hidden: Function (tensor name, dimension) that returns True if a width may cut the dimension.

        Raises:
            ModelError: A layer computes its weight from other tensors, or shares it with another layer.
        """
        specs = {name: TensorSpec.of(tensor) for name, tensor in module.state_dict().items()}
        return cls(specs, ratio, frozenset(_divided_names(module, hidden)))

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        return {name: w / self.ratio if name in self.divided else w for name, w in weights.items()}


def _divided_names(module: nn.Sequential, hidden: Hidden) -> Iterator[str]:
    """Yield the names of the state tensors to divide: weights and biases of layers whose outputs a width may cut."""
    for path, layer in module.named_modules():
        start = f"{path}." if path else ""
        for weight, bias, outputs in _linear(layer):
            outside = bias in layer.state_dict() and not hidden(start + bias, 0)
            if outside or getattr(layer, weight) is None:
                continue
            scaled, shaped = _stored_names(path, layer, weight)
            if hidden(start + shaped, outputs):
                yield start + scaled
                if getattr(layer, bias) is not None:
                    yield start + _stored_names(path, layer, bias)[0]


def _stored_names(path: str, layer: nn.Module, name: str) -> tuple[str, str]:
    """Return two names in the state of ``layer``: a tensor to divide so that ``name`` is divided, and one of the shape of
    ``name``.

    Both are ``name`` itself, unless the layer computes it from other tensors, as with weight norm.

    Raises:
        ModelError: There is no such tensor, as with spectral norm.
    """
    known = layer.state_dict().keys()
    forms = [(name, name), (f"{name}_g", f"{name}_v"), (f"{name}_orig", f"{name}_mask")]
    applied: Any = layer.parametrizations if parametrize.is_parametrized(layer, name) else {name: ()}
    if [type(each) for each in applied[name]] == [parametrizations._WeightNorm]:
        forms.append((f"parametrizations.{name}.original0", f"parametrizations.{name}.original1"))
    for form in forms:
        if known >= set(form):
            return form
    raise ModelError(
        f"layer {path!r} computes its {name} from other tensors, or shares it with another layer: expected one that scaler "
        "can divide; leave scaler off, or the parametrization",
        layer=path,
        tensor=name,
    )


def _linear(layer: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """Return (weight name, bias name, output dimension of the weight) of each linear map in a layer."""
    if isinstance(layer, nn.Linear):
        return (("weight", "bias", 0),)
    if isinstance(layer, nn.modules.conv._ConvNd):
        return (("weight", "bias", 1 if layer.transposed else 0),)
    if isinstance(layer, nn.MultiheadAttention):
        packed = layer.in_proj_weight is not None
        names = ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        return tuple((name, "in_proj_bias", 0) for name in names)
    return ()


Rounding = Literal["ceil", "floor"]
# Rounding errors of products: 0.29 * 100 should be 29, 0.7 * 10 should be 7.
_TOLERANCE = 1e-9
# Tensors that the text of an error names; its details have them all.
_NAMED = 4


@dataclass(frozen=True, eq=False)
class Width(Submodel):
    """Submodel with ``ratio`` of the channels of each layer of ``spec``, trained as a smaller model of the same type.

    A dimension of C channels keeps ``max(1, round(ratio * C))`` of them, rounded up (fiarse.md 3) or, for ``floor``, down
    (embracingfl.md 5). It keeps the first ones, or with ``rolling`` FedRolex's window: the channels ``(t + q) mod C`` in
    round t + 1. In products such as heads times entries, or groups times channels, the entries of each head and the
    channels of each group are cut.

    Attributes:
        ratio: Share of the channels, in (0, 1].
        rounding: ``ceil`` or ``floor``.
        rolling: True: move the window by one channel per round.
        scaler: True: divide the hidden layers by ``ratio``, in training and in inference (HeteroFL). Payload and update
            are unchanged.
        widths: Widths below ``ratio`` that are trained at random, besides ``ratio`` itself (FjORD). Inference, payload and
            update are unchanged.
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
    def of_gamma(cls, spec: ModelSpec, gamma: float) -> Width:
        """Return the slice of about ``gamma`` of the parameters: its ratio is sqrt(gamma) (fiarse.md 2.10).

        Raises:
            ModelError: ``gamma`` is outside (0, 1].
        """
        if not 0.0 < gamma <= 1.0:
            raise ModelError(f"gamma lies in (0, 1], found {gamma}", gamma=gamma)
        return cls(spec, math.sqrt(gamma))

    @cached_property
    def carrier(self) -> WholeCarrier | None:
        """Carrier (conversion between sent tensors and weights) that ordered dropout or the scaler needs in training.

        None: the tier uses neither.
        """
        if self.widths:
            parts = [self._narrower(ratio) for ratio in widths_below(self.ratio, self.widths)]
            return make_ordered_dropout(self.spec, self.suffix, self.regions(), parts) if parts else None
        return (
            ScalingCarrier.of(self.suffix, self.ratio, self._hidden)
            if self.scaler and self.ratio < 1.0
            else None
        )

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
        """Number of kept indices of each cut atom (group of channels, such as a layer's outputs and all that is tied to
        them).
        """
        return self._made[0]

    def selection(self, number: int = 1) -> Selection:
        """Return the held indices of each cut atom (group of channels) in round ``number``, counted from 1."""
        return rolling(self.counts, number - 1) if self.rolling else leading(self.counts)

    def regions(self, number: int = 1) -> Mapping[str, Region]:
        """Return the held region of each state tensor in round ``number``, counted from 1, by name. None: the whole
        tensor.
        """
        return regions(channels_of(self.spec), self.selection(number))

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        own_regions = self.regions(number)
        return Placement(own_regions, extract(weights, own_regions))

    def keep(self, size: int) -> int:
        """Return the number of kept channels out of ``size``."""
        return _kept(self.ratio, size, self.rounding)

    def _narrower(self, ratio: float) -> NestedWidth:
        part = replace(self, ratio=ratio, widths=())
        return NestedWidth(ratio, part.regions(), part.suffix)

    def _hidden(self, name: str, dim: int) -> bool:
        axis = channels_of(self.spec).axes[name][dim]
        return any(atom in self.counts for atom in atoms(axis))

    @cached_property
    def _made(self) -> tuple[Mapping[Atom, int], nn.Sequential]:
        """Tuple (number of kept indices by atom, which is a group of indices that is cut as one, and resulting model).

        Raises:
            ModelError: The model's code does not work with fewer channels.
        """
        try:
            return fit_cut(self.spec, channels_of(self.spec), self.keep)
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
            reason_text = "; ".join(f"{name!r}: {reason}" for name, reason in list(reasons.items())[:_NAMED])
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
    """Return the slice of ``ratio`` of the channels, or of about ``gamma`` of the parameters (HeteroFL, Diao et al.
    2021; fiarse.md 3).

    Args:
        spec: Model.
        ratio: Share of the channels. Default: all, or by ``gamma``.
        gamma: Share of the parameters.
        rounding: ``ceil`` or ``floor``, of the number of channels.
        rolling: True: move the window of channels by one in each round (FedRolex, Alam et al. 2022).
        scaler: True: divide the outputs of hidden layers by ``ratio``, in training and in inference (HeteroFL).
        ordered: True: train one of ``widths`` in each step (FjORD's ordered dropout, Horvath et al. 2021).
        widths: Shares of the channels for ``ordered``. Those above ``ratio`` are ignored.

    Raises:
        ModelError: Options contradict each other, or a layer cannot be cut.
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
        widths_below(ratio, widths)  # which refuses wrong ones, and none at all
    part = Width(spec, ratio, rounding, rolling, scaler, tuple(widths) if ordered else ())
    _ = part.carrier  # which may refuse the model
    return part

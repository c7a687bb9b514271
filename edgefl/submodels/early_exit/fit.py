"""Choosing a level for a size: the deepest exit that fits, then the width shrunk until it does (fiarse.md 3)."""

from __future__ import annotations

from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.early_exit.submodel import EarlyExit, branching
from edgefl.submodels.width.submodel import Rounding


def early_exit(
    spec: ModelSpec,
    *,
    exit: int | None = None,
    width: float | None = None,
    gamma: float | None = None,
    rounding: Rounding = "ceil",
) -> EarlyExit:
    """The units up to an early exit of the model, in a part of their channels; the model must have exits (ScaleFL, Ilhan et
    al. 2023; fiarse.md 3).

    ``exit`` is counted from 1 and by default the model's head, ``width`` is by default 1. ``gamma`` chooses what is not
    given: the deepest exit whose level, in that width, holds at most ``gamma`` of the parameters
    (:attr:`EarlyExit.share`), and where the first exit or the given one is too large still, the largest width that fits.
    ``rounding`` of the number of channels is ``ceil`` or ``floor``. ModelError for a model without exits, and if nothing
    fits, with what would.
    """
    model = branching(spec)
    deepest = len(model.exits) + 1
    if gamma is None:
        return EarlyExit(model, deepest if exit is None else exit, 1.0 if width is None else width, rounding)
    if not 0.0 < gamma <= 1.0:
        raise ModelError(f"gamma lies in (0, 1], found {gamma}", gamma=gamma)
    if exit is not None and width is not None:
        raise ModelError(
            f"gamma={gamma:g} chooses an exit or a width, and both are given: leave out one of exit, width and gamma",
            exit=exit,
            width=width,
            gamma=gamma,
        )
    exits = range(deepest, 0, -1) if exit is None else (exit,)
    for candidate in exits:
        level = EarlyExit(model, candidate, 1.0 if width is None else width, rounding)
        if level.share <= gamma:
            return level
    if width is not None:
        raise _too_small(level, gamma)
    return _narrowed(level, gamma)


def _narrowed(whole: EarlyExit, gamma: float) -> EarlyExit:
    """The widest slice of a level that fits, by bisection over the widths there are."""

    def sliced(channels: int) -> EarlyExit:
        return EarlyExit(whole.spec, whole.exit, channels / whole.widest, whole.rounding)

    fits, too_large = 0, whole.widest
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        if sliced(middle).share <= gamma:
            fits = middle
        else:
            too_large = middle
    if fits == 0:
        raise _too_small(sliced(1) if whole.widest > 1 else whole, gamma)
    return sliced(fits)


def _too_small(smallest: EarlyExit, gamma: float) -> ModelError:
    share = smallest.share
    return ModelError(
        f"no level of {smallest.spec.name} is as small as gamma={gamma:g}: exit {smallest.exit} in {smallest.width:.4g} of "
        f"the width holds {share:.4g} of the parameters; take gamma >= {share:.4g}, or another kind",
        gamma=gamma,
        exit=smallest.exit,
        width=smallest.width,
        smallest=share,
    )

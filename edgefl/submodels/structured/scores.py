"""How important each channel is, and which to hold, from the global weights on the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from edgefl.errors import ModelError
from edgefl.submodels.structured.gradient import Measure
from edgefl.submodels.structured.groups import Group, Source
from edgefl.wire.tensors import Array

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Score:
    """What a channel's importance is (fiarse.md 8.3, R5).

    ``source``: the kernels that make it, or its norm scales, |gamma| for one. ``measure``: their root mean square, or
    mean magnitude. ``relative`` divides by the same number of all the channel's layer at initialisation where channels
    of different layers compete, so that layers of any fan-in compete equally.
    """

    source: Source = "kernel"
    measure: Measure = "rms"
    relative: bool = True

    def __post_init__(self) -> None:
        for what, value, known in (
            ("score", self.source, get_args(Source)),
            ("measure", self.measure, get_args(Measure)),
        ):
            if value not in known:
                raise ModelError(f"{what} is one of {', '.join(known)}; found {value!r}", **{what: value})

    def of(self, group: Group, weights: Mapping[str, Array]) -> Values:
        """The importance of each channel (float64), not yet relative. ModelError for weights that are not finite."""
        total, shapes = 0.0, {part.name: weights[part.name].shape for part in group.scored}
        for part in group.scored:
            values = np.moveaxis(weights[part.name], part.dim, 0).astype(np.float64)
            if not np.isfinite(values).all():
                raise ModelError(
                    f"{part.name!r} has entries that are NaN or infinite, so importance cannot rank its channels; go "
                    "back to the last good weights, and lower the learning rate",
                    name=part.name,
                )
            raised = np.square(values) if self.measure == "rms" else np.abs(values)
            total = total + raised.reshape(len(values), -1).sum(1)[part.positions].sum(1)
        mean = np.asarray(total) / group.entries(shapes)
        return np.sqrt(mean) if self.measure == "rms" else mean

    def ranked(
        self, groups: Sequence[Group], weights: Mapping[str, Array], initial: Mapping[str, Array]
    ) -> list[Values]:
        """Importance per group as channels of all groups compete."""
        scores = [self.of(group, weights) for group in groups]
        if not self.relative:
            return scores
        return [own / self._scale(group, initial) for own, group in zip(scores, groups, strict=True)]

    def _scale(self, group: Group, initial: Mapping[str, Array]) -> float:
        first = self.of(group, initial)
        whole = np.sqrt(np.square(first).mean()) if self.measure == "rms" else first.mean()
        return float(whole) or 1.0


def strongest(values: Values, count: int) -> tuple[int, ...]:
    """The ``count`` largest, ties by lowest index, in ascending order of their indices."""
    return tuple(sorted(int(index) for index in np.argsort(-values, kind="stable")[:count]))

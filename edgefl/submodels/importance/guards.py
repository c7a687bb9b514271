"""What keeps a small submodel alive where a plain ranking would empty whole layers (fiarse.md 8.1, A9)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from edgefl.errors import ModelError
from edgefl.wire.tensors import Array


@dataclass(frozen=True)
class Guards:
    """Entries that are held whatever their rank, and how entries of different tensors compare. None is on by default.

    Guarded entries count: they are taken first and the rest of the budget goes by rank, so that a submodel never
    grows beyond its size.
    """

    # Every tensor keeps at least this many of its largest entries, or all that it has.
    min_keep: int = 0
    # Tensors that are held whole, such as ("stem", "head"): paths, or patterns of names with * and ?.
    dense: tuple[str, ...] = ()
    # Rank by |x| / s with s the spread of a tensor's initial values, so that layers of any fan-in compete equally.
    relative: bool = False

    def __post_init__(self) -> None:
        if self.min_keep < 0:
            raise ModelError(f"min_keep is at least 0, found {self.min_keep}", min_keep=self.min_keep)

    def whole(self, names: Sequence[str]) -> frozenset[str]:
        """Those of ``names`` that are held whole. ModelError for a pattern of ``dense`` that fits none."""
        whole_names: set[str] = set()
        for pattern in self.dense:
            fitting = {name for name in names if _fits(name, pattern)}
            if not fitting:
                raise ModelError(
                    f"no weight fits {pattern!r} of the guard 'dense'; there are {', '.join(names)}",
                    pattern=pattern,
                    names=tuple(names),
                )
            whole_names |= fitting
        return frozenset(whole_names)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def scales(initial: Mapping[str, Array]) -> dict[str, float]:
    """s per tensor: the standard deviation of its initial values, for :attr:`Guards.relative`.

    A tensor without spread, such as a bias of zeros, takes that of its layer's tensors together, which share a fan-in;
    a layer without any takes the whole model's.
    """
    layers: dict[str, list[Array]] = {}
    for name, values in initial.items():
        layers.setdefault(_layer(name), []).append(values)
    return {
        name: _spread([values]) or _spread(layers[_layer(name)]) or _spread(list(initial.values())) or 1.0
        for name, values in initial.items()
    }


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _spread(parts: Sequence[Array]) -> float:
    """Standard deviation (divided by n) of the parts' entries together; 0 where they are all equal."""
    size = sum(part.size for part in parts)
    first = float(parts[0].reshape(-1)[0])
    if all(bool((part == first).all()) for part in parts):
        return 0.0
    mean = sum(float(part.sum(dtype=np.float64)) for part in parts) / size
    return math.sqrt(sum(float(np.square(part - mean).sum(dtype=np.float64)) for part in parts) / size)

"""The one shape of a submodel: where its tensors lie in the global model.

This file imports no torch: the aggregator reads regions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from edgefl.wire.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from edgefl.models.spec import ModelSpec
    from edgefl.programs.contract import TensorSpec

# One (start, stop) per dimension of the global tensor; None is the whole tensor.
Region = tuple[tuple[int, int], ...] | None


class Submodel(Protocol):
    """What a tier holds and trains, of whichever kind.

    ``regions`` names every global tensor the tier trains (moving statistics included) and the part of it that the
    tier holds. A tensor that is not named is not held. Partial averaging needs nothing else: an entry of a global
    tensor becomes the mean over the active devices whose region covers it, and keeps its value if there are none.
    """

    @property
    def spec(self) -> ModelSpec:
        """The global model."""
        ...

    @property
    def suffix(self) -> nn.Sequential:
        """The trained units, in local shapes, under global names."""
        ...

    @property
    def boundary(self) -> TensorSpec:
        """One sample of what ``suffix`` reads, without the batch dimension."""
        ...

    @property
    def regions(self) -> Mapping[str, Region]: ...

    def extract(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tier's tensors out of the global ones, in local shapes (contiguous copies where they are cut)."""
        ...


def shape_of(region: Region, whole: tuple[int, ...]) -> tuple[int, ...]:
    """Local shape of the part of a tensor of shape ``whole`` that ``region`` covers."""
    return whole if region is None else tuple(stop - start for start, stop in region)


def slices(region: Region) -> tuple[slice, ...]:
    """An index for numpy and torch; ``tensor[slices(None)]`` is the whole tensor."""
    return () if region is None else tuple(slice(start, stop) for start, stop in region)


def check_region(name: str, region: Region, whole: tuple[int, ...]) -> None:
    """ModelError unless ``region`` lies inside a tensor of shape ``whole``."""
    if region is None:
        return
    inside = all(0 <= start < stop <= size for (start, stop), size in zip(region, whole, strict=False))
    if len(region) != len(whole) or not inside:
        raise ModelError(
            f"the region {region} of {name!r} does not lie in its shape {whole}",
            name=name,
            region=region,
            shape=whole,
        )

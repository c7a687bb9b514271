"""Width reduction: the leading channels of every layer (HeteroFL's static variant and FjORD's slices, spec 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from edgefl.models.spec import ModelSpec
from edgefl.programs.contract import TensorSpec
from edgefl.submodels.submodel import Region, slices
from edgefl.wire.errors import ModelError


@dataclass(frozen=True, eq=False)
class WidthSlice:
    """The first floor(ratio * C) channels of each layer of ``spec``; input channels and classes stay whole.

    A kernel (C_out, C_in, kh, kw) keeps ``[:k_out, :k_in]``, batch-norm vectors and projection shortcuts alike.
    The whole local model is trained. HeteroFL's activation scaler and masked cross-entropy are left out (spec 5).
    """

    spec: ModelSpec
    ratio: float

    def __post_init__(self) -> None:
        if not 0.0 < self.ratio <= 1.0:
            raise ModelError(f"a width ratio lies in (0, 1], found {self.ratio}", ratio=self.ratio)
        if self.spec.narrow is None:
            raise ModelError(
                f"{self.spec.name} has no narrower siblings: a width slice needs ModelSpec.narrow, as the ResNets "
                "have",
                model=self.spec.name,
            )

    @cached_property
    def local(self) -> ModelSpec:
        """The narrow model; only its shapes matter, its values come from :meth:`extract`."""
        if self.spec.narrow is None:
            raise ModelError(f"{self.spec.name} has no narrower siblings", model=self.spec.name)
        return self.spec.narrow(self.ratio)

    @property
    def suffix(self) -> nn.Sequential:
        return self.local.module

    @property
    def boundary(self) -> TensorSpec:
        return self.spec.sample

    @cached_property
    def regions(self) -> Mapping[str, Region]:
        """Per tensor, the leading block whose shape the narrow model has."""
        whole = self.spec.weights
        return {
            name: _leading(tuple(tensor.shape), tuple(whole[name].shape))
            for name, tensor in self.local.weights.items()
        }

    def extract(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weights[name][slices(region)].contiguous() for name, region in self.regions.items()}

    def coverage(self) -> dict[str, Tensor]:
        """Per global tensor, 1.0 where this slice holds the entry and 0.0 elsewhere."""
        covered = {name: torch.zeros(tensor.shape) for name, tensor in self.spec.weights.items()}
        for name, region in self.regions.items():
            covered[name][slices(region)] = 1.0
        return covered


def _leading(local: tuple[int, ...], whole: tuple[int, ...]) -> Region:
    return None if local == whole else tuple((0, size) for size in local)

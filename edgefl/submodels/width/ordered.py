"""FjORD's ordered dropout: a tier trains one of several nested widths in each step (fiarse.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec, skeleton
from edgefl.objective.carrier import Specs, WholeCarrier
from edgefl.wire.regions import BlockRegion, Region

WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Widths p of the paper."""

NOISE = "width"
Noise = Mapping[str, Tensor]
_ROWS = 8
# A sliced model adds the same numbers in another order.
_TOLERANCE = 1e-4
_SEED = 0


@dataclass(frozen=True)
class NestedWidth:
    """A width narrower than the tier's own, which ordered dropout trains at random.

    Attributes:
        ratio: Share of the channels.
        regions: Held part of each tensor in the global model, by name.
        module: Modules of this width.
    """

    ratio: float
    regions: Mapping[str, Region]
    module: nn.Sequential


def widths_below(ratio: float, widths: Sequence[float]) -> tuple[float, ...]:
    """Return the ``widths`` (shares of the channels) that are below ``ratio``, the share that the tier holds, ascending.

    Raises:
        ModelError: A width is outside (0, 1], or ``widths`` is empty.
    """
    wrong = [p for p in widths if not 0.0 < p <= 1.0]
    if wrong or not widths:
        raise ModelError(
            f"ordered dropout draws from widths in (0, 1], such as {list(WIDTHS)}; found {list(widths)}",
            widths=tuple(widths),
        )
    return tuple(sorted({p for p in widths if p < ratio - 1e-9}))


def make_ordered_dropout(
    spec: ModelSpec, module: nn.Sequential, own: Mapping[str, Region], parts: Sequence[NestedWidth]
) -> OrderedDropout:
    """Return the carrier that trains one random width per step: one of ``parts``, or the whole ``module``, the largest.

    The width is drawn by one uniform number u, ``noise.width``. Of n widths, ascending, it selects number floor(u n).
    Entries of channels that a width lacks are replaced by zeros, norms' scales and shifts too. So a dropped channel
    is exactly absent: it gets no gradient and its moving statistics do not change. All steps have the shapes of the
    largest width, so a narrow step costs as much as a wide one.

    Norms are not separate per width: a channel has one pair of moving statistics for all widths that hold it, and
    models with ``bn = "static"`` suit best.

    Args:
        spec: Model.
        module: The tier's modules.
        own: Regions (held entries in ``spec``) of the tensors of ``module``, by name.
        parts: Narrower widths, ascending.

    Raises:
        ModelError: The widths are not nested, or the model without some channels computes something else than the
            sliced model. Layer norms and attention do, because their statistics and scales depend on the width.
    """
    order = OrderedDropout.of(module, own, parts)
    for index, part in enumerate(parts):
        _check(spec, module, part, order, index)
    return order


@dataclass(frozen=True, eq=False)
class OrderedDropout(WholeCarrier):
    """Carrier (conversion between sent tensors and weights) with which each training step reads the weights at a
    random width.

    Inference reads them unchanged.

    Attributes:
        levels: For each dimension of a tensor, by the tensor's name, the number of the narrowest width that holds each
            index. None: all widths hold all indices.
        count: Number of widths.
    """

    levels: Mapping[str, tuple[Tensor | None, ...]]
    count: int

    @classmethod
    def of(
        cls, module: nn.Sequential, own: Mapping[str, Region], parts: Sequence[NestedWidth]
    ) -> OrderedDropout:
        """Return the carrier (conversion between sent tensors and weights) of the tensors of ``module``.

        It is not checked that its widths equal sliced models.

        Args:
            module: The tier's modules.
            own: Regions of its tensors in the global model, by name.
            parts: Narrower widths, ascending.

        Raises:
            ModelError: The widths are not nested.
        """
        specs = {name: TensorSpec.of(tensor) for name, tensor in module.state_dict().items()}
        levels = {
            name: tuple(_levels(name, dim, size, own, parts) for dim, size in enumerate(spec.shape))
            for name, spec in specs.items()
        }
        return cls(specs, levels, len(parts) + 1)

    @property
    def noise(self) -> Specs:
        return {NOISE: TensorSpec(())}

    def effective(self, weights: Tensors, gates: Tensors, noise: Noise, *, training: bool) -> Tensors:
        """Return the tensors that layers read, by name: in training with zeros outside a random width, else ``weights``
        itself.

        The tensor ``width`` of ``noise`` chooses the width.
        """
        return self.narrow(weights, self._draw(noise)) if training else weights

    def keep_idle(self, moved: Tensors, before: Tensors, noise: Noise) -> Tensors:
        return self._select(moved, self._draw(noise), lambda name: before[name])

    def narrow(self, weights: Tensors, index: Tensor) -> Tensors:
        """Return ``weights`` by name with zeros outside width number ``index``, an integer tensor (). 0 is the
        narrowest.
        """
        return self._select(weights, index, lambda name: torch.zeros(()))

    def _draw(self, noise: Noise) -> Tensor:
        return (noise[NOISE] * self.count).to(torch.int64).clamp(max=self.count - 1)

    def _select(self, tensors: Tensors, index: Tensor, other: Callable[[str], Tensor]) -> Tensors:
        selected = dict(tensors)
        for name, tensor in tensors.items():
            mask = self._held_mask(name, index)
            if mask is not None:
                selected[name] = torch.where(mask, tensor, other(name))
        return selected

    def _held_mask(self, name: str, index: Tensor) -> Tensor | None:
        """Return the mask of the entries of tensor ``name`` that width number ``index`` holds, in a shape that
        broadcasts.

        None: it holds all entries.
        """
        mask: Tensor | None = None
        levels = self.levels[name]
        for dim, level in enumerate(levels):
            if level is not None:
                own = (level <= index).reshape([-1 if other == dim else 1 for other in range(len(levels))])
                mask = own if mask is None else mask & own
        return mask


def _levels(
    name: str, dim: int, size: int, own: Mapping[str, Region], parts: Sequence[NestedWidth]
) -> Tensor | None:
    """Return the number of the narrowest width that holds each index of a dimension. None: all widths hold all indices.

    Args:
        name: Name of the tensor.
        dim: Dimension.
        size: Size of the dimension in the tier's own width.
        own: Regions of the tier's tensors.
        parts: Narrower widths, ascending.

    Raises:
        ModelError: A width holds an index that the next larger one lacks.
    """
    mine = _indices(own[name], dim, size)
    level = dict.fromkeys(mine, len(parts))
    whole = max(mine) + 1
    for number in reversed(range(len(parts))):
        indices = _indices(parts[number].regions[name], dim, whole)
        if any(level.get(index) != number + 1 for index in indices):
            raise ModelError(
                f"width {parts[number].ratio:g} holds channels of {name!r} (dimension {dim}) that the next larger one "
                "does not; ordered dropout needs nested widths: leave out one of the two",
                tensor=name,
                ratio=parts[number].ratio,
            )
        level |= dict.fromkeys(indices, number)
    levels = [level[index] for index in mine]
    return torch.tensor(levels) if any(levels) else None


def _indices(region: Region, dim: int, size: int) -> Sequence[int]:
    indices = region.axes[dim] if isinstance(region, BlockRegion) else None
    return range(size) if indices is None else indices


@torch.no_grad()
def _check(
    spec: ModelSpec, module: nn.Sequential, part: NestedWidth, order: OrderedDropout, index: int
) -> None:
    """Raise ModelError unless ``module`` without the channels that ``part`` lacks returns the outputs of ``part``.

    Both run in inference on random rows and weights.

    Args:
        spec: Model.
        module: The tier's modules.
        part: Narrower width.
        order: Carrier, which sets the channels to zero.
        index: Number of the width in ``order``.
    """
    generator = torch.Generator().manual_seed(_SEED)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        if isinstance(tensor, nn.Parameter)
        else tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    masked = order.narrow(weights, torch.tensor(index))
    sliced = {name: _slice(tensor, order.levels[name], index) for name, tensor in weights.items()}
    x = _rows(spec.sample, generator)
    expected = _output(part.module, sliced, x)
    apart = (_output(module, masked, x) - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    if not apart <= _TOLERANCE:  # NaN is no agreement
        raise ModelError(
            f"{spec.name} without the channels above width {part.ratio:g} is not the model of that width: outputs "
            f"differ by {float(apart):.2g} of the largest. Layer norm, group norm and attention depend on how many "
            "channels there are; use a model with batch norm, or kind width without ordered",
            model=spec.name,
            ratio=part.ratio,
            apart=float(apart),
        )


def _slice(tensor: Tensor, levels: tuple[Tensor | None, ...], index: int) -> Tensor:
    for dim, level in enumerate(levels):
        if level is not None:
            tensor = tensor.index_select(dim, torch.nonzero(level <= index).reshape(-1))
    return tensor


def _output(module: nn.Sequential, tensors: Tensors, x: Tensor) -> Tensor:
    out: Tensor = torch.func.functional_call(skeleton(module, training=False), tensors, (x,))
    return out


def _rows(sample: TensorSpec, generator: torch.Generator) -> Tensor:
    if sample.below is not None:
        return torch.randint(0, sample.below, (_ROWS, *sample.shape), generator=generator)
    return torch.randn((_ROWS, *sample.shape), generator=generator)

"""FjORD's ordered dropout: a tier trains one of several nested widths in each step (fiarse.md 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec, skeleton
from edgefl.objective.carrier import Specs, Whole
from edgefl.wire.regions import Block, Region

WIDTHS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""The paper's p."""

NOISE = "width"
Noise = Mapping[str, Tensor]
_ROWS = 8
# A sliced model adds the same numbers in another order.
_TOLERANCE = 1e-4
_SEED = 0


@dataclass(frozen=True)
class Narrower:
    """One of the widths below a tier's own: its ratio, where its tensors lie in the global model, and its modules."""

    ratio: float
    regions: Mapping[str, Region]
    module: nn.Sequential


def narrower(ratio: float, widths: Sequence[float]) -> tuple[float, ...]:
    """Those of ``widths`` that lie below a tier's own ``ratio``, ascending. ModelError for one outside (0, 1]."""
    wrong = [p for p in widths if not 0.0 < p <= 1.0]
    if wrong or not widths:
        raise ModelError(
            f"ordered dropout draws from widths in (0, 1], such as {list(WIDTHS)}; found {list(widths)}",
            widths=tuple(widths),
        )
    return tuple(sorted({p for p in widths if p < ratio - 1e-9}))


def ordered(
    spec: ModelSpec, module: nn.Sequential, own: Mapping[str, Region], parts: Sequence[Narrower]
) -> OrderedDropout:
    """Each step computes with one width, drawn with equal chances: a ``part``, or ``module`` whole, the tier's maximum.

    ``own`` says where ``module``'s tensors lie in ``spec``. The draw is one uniform number, ``noise.width``; of n
    widths, ascending, u selects number floor(u n). Entries of channels that a width lacks are selected away, norms'
    scales and shifts too, so a dropped channel is exactly absent: it gets no gradient and its moving statistics rest.
    Shapes are those of the maximum, so a narrow step costs what a wide one does.

    There are no norms of their own per width: of moving statistics, a channel has one pair for all widths that hold
    it, and models with ``bn = "static"`` suit best. ModelError where leaving channels out is not the same as a sliced
    model, as in layer norms and attention, whose statistics and scales depend on the width.
    """
    order = OrderedDropout.of(module, own, parts)
    for index, part in enumerate(parts):
        _check(spec, module, part, order, index)
    return order


@dataclass(frozen=True, eq=False)
class OrderedDropout(Whole):
    """Weights that each training step reads at a drawn width. Inference reads them as they are.

    ``levels``: per tensor and dimension, for each index the number of the narrowest width that holds it.
    """

    levels: Mapping[str, tuple[Tensor | None, ...]]
    count: int

    @classmethod
    def of(
        cls, module: nn.Sequential, own: Mapping[str, Region], parts: Sequence[Narrower]
    ) -> OrderedDropout:
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
        """Return the tensors of the drawn width, with zeros elsewhere."""
        return self.narrowed(weights, self._drawn(noise)) if training else weights

    def rested(self, moved: Tensors, before: Tensors, noise: Noise) -> Tensors:
        return self._selected(moved, self._drawn(noise), lambda name: before[name])

    def narrowed(self, weights: Tensors, index: Tensor) -> Tensors:
        return self._selected(weights, index, lambda name: torch.zeros(()))

    def _drawn(self, noise: Noise) -> Tensor:
        return (noise[NOISE] * self.count).to(torch.int64).clamp(max=self.count - 1)

    def _selected(self, tensors: Tensors, index: Tensor, other: Callable[[str], Tensor]) -> Tensors:
        selected = dict(tensors)
        for name, tensor in tensors.items():
            mask = self._held(name, index)
            if mask is not None:
                selected[name] = torch.where(mask, tensor, other(name))
        return selected

    def _held(self, name: str, index: Tensor) -> Tensor | None:
        """Which entries of a tensor width number ``index`` holds, in a shape that broadcasts; None for all."""
        mask: Tensor | None = None
        levels = self.levels[name]
        for dim, level in enumerate(levels):
            if level is not None:
                own = (level <= index).reshape([-1 if other == dim else 1 for other in range(len(levels))])
                mask = own if mask is None else mask & own
        return mask


def _levels(
    name: str, dim: int, size: int, own: Mapping[str, Region], parts: Sequence[Narrower]
) -> Tensor | None:
    """For each index of a dimension, the number of the first width that holds it; None if all of them hold all."""
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
    indices = region.axes[dim] if isinstance(region, Block) else None
    return range(size) if indices is None else indices


@torch.no_grad()
def _check(spec: ModelSpec, module: nn.Sequential, part: Narrower, order: OrderedDropout, index: int) -> None:
    """ModelError unless ``module`` without the channels that ``part`` lacks gives the outputs of ``part``."""
    generator = torch.Generator().manual_seed(_SEED)
    weights = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        if isinstance(tensor, nn.Parameter)
        else tensor
        for name, tensor in module.state_dict(keep_vars=True).items()
    }
    masked = order.narrowed(weights, torch.tensor(index))
    sliced = {name: _sliced(tensor, order.levels[name], index) for name, tensor in weights.items()}
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


def _sliced(tensor: Tensor, levels: tuple[Tensor | None, ...], index: int) -> Tensor:
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

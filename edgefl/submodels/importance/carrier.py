"""Transport (fiarse.md 2.8) and training (2.4, TCB-GD) of the most important single entries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, TensorSpec, select
from edgefl.objective.carrier import Carrier

MASK, VALUES, THETA = "submodel.mask", "submodel.values", "submodel.theta"
"""Names of the payload's own tensors; an update carries VALUES only."""


@dataclass(frozen=True, eq=False)
class TopEntriesCarrier(Carrier):
    """Carrier of ``kept`` entries of the ``maskable`` tensors, in the order of their names, and of dense tensors.

    Payload: MASK (uint8, ceil(d / 8) bytes, bit j of byte i is entry 8 i + j), VALUES (float32, ``kept``), THETA (float32,
    one per maskable tensor) and the dense tensors. An update has VALUES, in the same order, and the dense tensors without
    the ``frozen`` ones: the server knows the mask, and the tensors that training does not change.

    Attributes:
        maskable: Specs of the tensors of which single entries are held.
        dense: Specs of the tensors that are held whole.
        kept: Number of held entries of the maskable tensors.
        remask: True: compute M = M0 and |w| >= theta in each step. False: M = M0, the received mask.
        bias: True: multiply the gradient by 1 + 2 |w| theta / (|w| + theta)^2 (eq. 3). With ``remask`` and ``bias`` off
            the method is pruning-greedy (fiarse.md 2.5).
        freeze_dropped: True: momentum and decay do not move entries that the current mask dropped (fiarse.md A6).
        frozen: Dense tensors that training does not change.
    """

    maskable: Mapping[str, TensorSpec]
    dense: Mapping[str, TensorSpec]
    kept: int
    remask: bool = False
    bias: bool = False
    freeze_dropped: bool = True
    frozen: frozenset[str] = frozenset()

    def with_switches(self, *, remask: bool, bias: bool, freeze_dropped: bool) -> TopEntriesCarrier:
        return replace(self, remask=remask, bias=bias, freeze_dropped=freeze_dropped)

    @cached_property
    def entries(self) -> int:
        """Number of entries d of all maskable tensors."""
        return sum(math.prod(spec.shape) for spec in self.maskable.values())

    @cached_property
    def payload(self) -> dict[str, TensorSpec]:
        chosen = {
            MASK: TensorSpec((-(-self.entries // 8),), torch.uint8, below=256),
            VALUES: TensorSpec((self.kept,)),
            THETA: TensorSpec((len(self.maskable),)),
        }
        return chosen | dict(self.dense)

    @cached_property
    def gates(self) -> dict[str, TensorSpec]:
        masks = {f"mask.{name}": TensorSpec(spec.shape, torch.bool) for name, spec in self.maskable.items()}
        return masks | {"theta": TensorSpec((len(self.maskable),))}

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of the dense tensors that an update contains: all but the ``frozen`` ones."""
        return tuple(name for name in self.dense if name not in self.frozen)

    @cached_property
    def update(self) -> dict[str, TensorSpec]:
        return {VALUES: TensorSpec((self.kept,))} | {name: self.dense[name] for name in self.returned}

    def unpack(self, payload: Tensors) -> tuple[Tensors, Tensors]:
        """Return (weights by name with zeros outside the mask, gates).

        The gates are ``theta``, one threshold per maskable tensor, and ``mask.<name>``, bool in the tensor's shape.
        Works tensor by tensor, to keep the peak memory low.
        """
        weights = {name: payload[name] for name in self.dense}
        gates = {"theta": payload[THETA]}
        before, start = torch.zeros((), dtype=torch.int64), 0
        for name, spec in self.maskable.items():
            mask = _bits(payload[MASK], start, math.prod(spec.shape))
            place = before + mask.to(torch.int64).cumsum(0) - 1
            values = payload[VALUES].index_select(0, place.clamp(0, self.kept - 1))
            weights[name] = torch.where(mask, values, torch.zeros(())).reshape(spec.shape)
            gates[f"mask.{name}"] = mask.reshape(spec.shape)
            before, start = place[-1] + 1, start + mask.numel()
        return weights, gates

    def held(self, gates: Tensors) -> Tensors:
        return select(gates, "mask")

    def effective(
        self, weights: Tensors, gates: Tensors, noise: Mapping[str, Tensor], *, training: bool
    ) -> Tensors:
        """Return the weights that layers read: W = where(M, w, 0). ``where`` keeps even NaN outside the mask out of the
        result.

        In training, :attr:`remask` decides the mask M. In inference it is M0: the entries that the tier received.
        """
        read = dict(weights)
        for name, mask in self._masks(weights, gates, anew=training and self.remask).items():
            read[name] = torch.where(mask, weights[name], torch.zeros(()))
        return read

    def descent(self, grads: Tensors, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the direction of a step, G = dF/dW * M * (1 + 2 |x| theta / (|x| + theta)^2), by name (eq. 3).

        The fraction is 0 if x = theta = 0. Without :attr:`bias` return ``grads`` itself. With r = |x| / (|x| + theta)
        the fraction is 2 r (1 - r), without a square that could exceed float32's range.
        """
        if not self.bias:
            return grads
        scaled = dict(grads)
        for name, mask in self._masks(weights, gates, anew=self.remask).items():
            size = weights[name].abs()
            both = size + self._theta(name, gates)
            ratio = size / torch.where(both > 0, both, torch.ones(()))
            factor = 1 + 2 * ratio * (1 - ratio)
            scaled[name] = torch.where(mask, grads[name] * factor, torch.zeros(()))
        return scaled

    def confine(self, new: Tensors, old: Tensors, gates: Tensors) -> Tensors:
        confined = dict(new)
        for name, mask in self._masks(old, gates, anew=self.remask and self.freeze_dropped).items():
            confined[name] = torch.where(mask, new[name], old[name])
        return confined

    def pack(self, weights: Tensors, gates: Tensors) -> Tensors:
        """Return the tensors of an update by name: VALUES (the kept entries in order), and the dense tensors that an
        update contains.

        Each kept entry is scattered to its position, all others to one position behind the last.
        """
        values = torch.zeros(self.kept + 1, dtype=next(iter(weights.values())).dtype)
        before = torch.zeros((), dtype=torch.int64)
        for name in self.maskable:
            mask = gates[f"mask.{name}"].reshape(-1)
            place = before + mask.to(torch.int64).cumsum(0) - 1
            target = torch.where(mask, place.clamp(max=self.kept), torch.full((), self.kept))
            values = values.scatter(0, target, weights[name].reshape(-1))
            before = place[-1] + 1
        return {VALUES: values[: self.kept]} | {name: weights[name] for name in self.returned}

    def _masks(self, weights: Tensors, gates: Tensors, *, anew: bool) -> Tensors:
        """Return the masks, by name, of the maskable tensors among ``weights``.

        Args:
            weights: Current weights by name.
            gates: Received masks and thresholds.
            anew: True: also drop entries below their threshold.
        """
        masks = select(gates, "mask")
        own_masks = {name: masks[name] for name in self.maskable if name in weights}
        if not anew:
            return own_masks
        return {
            name: mask & (weights[name].detach().abs() >= self._theta(name, gates))
            for name, mask in own_masks.items()
        }

    def _theta(self, name: str, gates: Tensors) -> Tensor:
        return gates["theta"][list(self.maskable).index(name)]


def _bits(packed: Tensor, start: int, count: int) -> Tensor:
    """Return bits ``start`` .. ``start + count`` - 1 of packed bytes as bool (count,). The lowest bit of a byte is the
    first.
    """
    first, last = start // 8, -(-(start + count) // 8)
    powers = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    bits = (packed[first:last, None] & powers) != 0
    return bits.reshape(-1)[start - 8 * first : start - 8 * first + count]

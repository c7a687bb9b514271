"""FIARSE: a tier holds the largest entries of the global model, selected again in each round (fiarse.md 2.3, 2.8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import torch

from edgefl.contract.tensors import TensorSpec
from edgefl.errors import ModelError
from edgefl.models.spec import ModelSpec
from edgefl.submodels.importance.carrier import MASK, THETA, VALUES, TopEntriesCarrier
from edgefl.submodels.importance.learnable import as_options, check_liveness, find_remedies
from edgefl.submodels.importance.strategy import GroupingStrategy, Kind, dense, frozen, maskable
from edgefl.submodels.importance.thresholds import (
    NO_GUARDS,
    Groups,
    Guards,
    ImportanceMasks,
    check_gamma,
    cut,
    kept_count,
    scales,
)
from edgefl.submodels.submodel import Submodel, units_with_tensors
from edgefl.wire import bits
from edgefl.wire.regions import EntryRegion, Placement, Region
from edgefl.wire.tensors import Array, Arrays


@dataclass(frozen=True, eq=False)
class Importance(Submodel):
    """The ``gamma`` share of ``spec``'s maskable entries with the largest magnitudes, and all dense tensors.

    The graphs depend on the number of entries alone, so one bundle serves every round. With gamma = 1 there is no
    selection and no threshold (fiarse.md A8): no mask is sent. Devices download and train the model's units (stages of
    the model) like any tier that trains the whole model, by plain SGD.

    The server averages an update's weights over the holders of an entry. For a server step of 1 that is the paper's ``x -
    mean(Delta)`` with ``Delta = x - x_K`` over the holders (fiarse.md 2.7). The mean of ``x - Delta_i`` is the same. A
    dense parameter that is not trained is sent to devices, but not back.

    Attributes:
        gamma: Share of the entries, in (0, 1].
        strategy: Rule by which tensors share a threshold.
        guards: Entries that are held regardless of rank.

    Raises:
        ModelError: gamma is outside (0, 1], the model has no maskable tensors or has floats other than float32, or
            guards do not fit.
    """

    kind = "importance"
    spec: ModelSpec
    gamma: float
    strategy: GroupingStrategy = GroupingStrategy()  # noqa: RUF009  frozen
    guards: Guards = NO_GUARDS

    def __post_init__(self) -> None:
        check_gamma(self.gamma)
        _check_float32(self.spec)
        self.cut_of({name: tensor.numpy() for name, tensor in self.spec.weights.items()})

    @cached_property
    def units(self) -> tuple[str, ...]:
        return units_with_tensors(self.spec.module) if self.carrier is None else ()

    @property
    def moves(self) -> bool:
        return self.carrier is not None

    @property
    def identity(self) -> Mapping[str, object]:
        return {
            "kind": self.kind,
            "gamma": self.gamma,
            "strategy": asdict(self.strategy),
            "guards": asdict(self.guards),
        }

    @cached_property
    def carrier(self) -> TopEntriesCarrier | None:
        if self.gamma == 1:
            return None
        state = self.spec.module.state_dict(keep_vars=True)
        specs = {name: TensorSpec.holding(state[name]) for name in self.spec.weights}
        return TopEntriesCarrier(
            maskable={name: specs[name] for name in maskable(self.spec)},
            dense={name: specs[name] for name in dense(self.spec)},
            kept=self.kept,
            frozen=frozen(self.spec),
        )

    @cached_property
    def kept(self) -> int:
        """Number of entries of maskable tensors that the tier holds: k, summed over the groups."""
        sizes = {name: tensor.numel() for name, tensor in self.spec.weights.items()}
        entries = [sum(sizes[name] for name in group) for group in self._groups]
        return sum(entries) if self.gamma == 1 else sum(kept_count(self.gamma, number) for number in entries)

    def cut_of(self, weights: Mapping[str, Array]) -> ImportanceMasks:
        """Return the masks and thresholds of this submodel for the global ``weights``.

        Raises:
            ModelError: A weight is missing or not finite, or the guards (entries that are held regardless of rank)
                alone exceed the size.
        """
        return cut(weights, self.gamma, self._groups, self.guards, self._scales)

    def place(self, weights: Mapping[str, Array], number: int) -> Placement:
        """Return the regions (positions in the global ``weights``) of the largest entries, and their values as the
        payload.

        The payload has arrays that only this tier receives. For gamma = 1 the regions are all tensors and the payload
        is empty. The round's number has no effect.
        """
        if self.carrier is None:
            return Placement(dict.fromkeys(self.spec.weights))
        chosen, always = tuple(self.carrier.maskable), tuple(self.carrier.dense)
        current_cut = self.cut_of(weights)
        flat = np.concatenate([current_cut.masks[name].reshape(-1) for name in chosen])
        payload: Arrays = {name: weights[name] for name in always}
        payload[MASK] = bits.pack(flat)
        payload[VALUES] = np.concatenate([weights[name][current_cut.masks[name]] for name in chosen]).astype(
            np.float32, copy=False
        )
        payload[THETA] = np.array([current_cut.theta[name] for name in chosen], np.float32)
        regions: dict[str, Region] = {
            VALUES: EntryRegion(chosen, np.flatnonzero(flat)),
            **dict.fromkeys(self.carrier.returned),
        }
        return Placement(regions, payload, {MASK: flat.size})

    def warnings(self, weights: Mapping[str, Array]) -> tuple[str, ...]:
        """Return one warning if the submodel cannot learn from these initial weights (fiarse.md A9), else ().

        The text has the reason, and options with which it can learn. For gamma = 1, the whole model, the result is ().
        """
        if self.carrier is None:
            return ()
        size = f"importance at gamma {self.gamma:g}"
        try:
            report = check_liveness(self.spec, self.cut_of(weights), weights)
            return () if report.alive else (f"{size} is dead: {report.verdict}; {self._cure(weights)}",)
        except ModelError as error:
            return (f"{size} could not be checked for whether it can learn: {error.message}",)

    def _cure(self, weights: Mapping[str, Array]) -> str:
        """Return a text that lists options with which the submodel can learn, or that says that no guard helps."""
        named = self.strategy.kind != "model"
        ways = [
            f"{{ {as_options(strategy, guards, named=named)} }}"
            for strategy, guards in find_remedies(self.spec, self.gamma, weights)
        ]
        if not ways:
            return "no guard on its own revives it at the initial weights: take a larger gamma"
        return f"options that each revive it at the initial weights: {' or '.join(ways)}"

    @cached_property
    def _groups(self) -> Groups:
        return self.strategy.groups(self.spec)

    @cached_property
    def _scales(self) -> dict[str, float] | None:
        """Spread of each tensor's initial values, if the guard ``relative`` is on, else None."""
        if not self.guards.relative:
            return None
        return scales({name: self.spec.weights[name].numpy() for name in maskable(self.spec)})


def _check_float32(spec: ModelSpec) -> None:
    """Raise ModelError if a tensor of the model is a float other than float32. Payload and thresholds are float32."""
    for name, tensor in spec.weights.items():
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ModelError(
                f"tensor {name!r} of {spec.name} is {tensor.dtype}, and importance takes float32 only: call .float() on "
                "the model",
                name=name,
                dtype=str(tensor.dtype),
            )


def importance(
    spec: ModelSpec,
    *,
    gamma: float = 1.0,
    strategy: Kind = "model",
    shards: int | Sequence[Sequence[str]] | None = None,
    min_keep: int = 0,
    dense: Sequence[str] = (),
    relative: bool = False,
) -> Importance:
    """Return the ``gamma`` of the entries with the largest magnitude, selected again in each round (FIARSE, Wu et al.
    2024; fiarse.md 2.3).

    Train them with algorithm ``tcbgd``.

    Args:
        spec: Model.
        gamma: Share of the entries, in (0, 1].
        strategy: ``model``, ``layer`` or ``shard``: the tensors that share a threshold.
        shards: Paths of each shard, or a number of shards.
        min_keep: Smallest number of kept entries of each tensor.
        dense: Paths or patterns of tensors that are held whole.
        relative: True: rank relative to the spread of each tensor's initial values.

    Raises:
        ModelError: gamma is outside (0, 1], the model has no maskable tensors or has floats other than float32, or the
            options do not fit.
    """
    parts = shards if shards is None or isinstance(shards, int) else tuple(tuple(shard) for shard in shards)
    return Importance(
        spec, gamma, GroupingStrategy(strategy, parts), Guards(min_keep, tuple(dense), relative)
    )

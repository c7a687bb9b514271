"""Exchanges in which devices measure the statistics of batch norm of their submodel, and evaluate the model with them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgefl.algorithms.evaluation import EVALUATE, evaluation
from edgefl.algorithms.norm_statistics import norm_statistics, reads_statistics
from edgefl.config import Federation
from edgefl.contract.algorithm import Function
from edgefl.contract.tensors import prefixed, select
from edgefl.models.spec import ModelSpec
from edgefl.setup.evaluation import estimated_statistics
from edgefl.setup.training import tiers_of
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.submodels.statistics import MomentsMode, use_batch, with_buffers
from edgefl.submodels.submodel import Submodel
from edgefl.wire.norm_statistics import MEASURED, NORMS, WHOLE, tier_family, unit_of
from edgefl.wire.tensors import Arrays
from edgefl_export.compiler.request import ChunkForward, Exchange, TierTraining


@dataclass(frozen=True)
class NormMeasurement:
    """Measurement of the statistics of batch norm by tier. An exchange is one round trip between server and device.

    Attributes:
        measure: Exchange by tier in which its devices measure the statistics of their norm layers.
        evaluate: Exchange by tier in which its devices evaluate the model with the measured statistics.
        families: Name by tier under which the server keeps its statistics. Tiers without norm layers are left out.
        variances: Name of the mean that belongs to each variance, by name of the variance.
        initial: Initial values of all statistics by their name on the server.
    """

    measure: Mapping[str, Exchange]
    evaluate: Mapping[str, Exchange]
    families: Mapping[str, str]
    variances: Mapping[str, str]
    initial: Arrays


def family_of(tier: str, submodel: Submodel) -> str:
    """Return the name under which the batch-norm statistics of ``tier`` are kept.

    Tiers that evaluate the whole model share a name.
    """
    return WHOLE if isinstance(submodel, OutputSide) else tier_family(tier)


def norm_measurement(federation: Federation, spec: ModelSpec) -> NormMeasurement | None:
    """Return the measurement of the statistics that training leaves open; None if it leaves open none.

    These are the statistics of static batch norms, and moving ones if tiers train narrow or masked submodels.

    Args:
        federation: The federation.
        spec: Its model.
    """
    names = estimated_statistics(federation, spec)
    if not names or not federation.evaluate.split:
        return None
    tiers = tiers_of(federation, replace(spec, module=with_buffers(spec.module)))
    private = frozenset[str]().union(*(tier.algorithm.private for tier in tiers.values()))
    names = tuple(name for name in names if name not in private)
    # No training keeps these, so that their layers still read each batch.
    if unkept := private - spec.weights.keys():
        tiers = tiers_of(federation, replace(spec, module=with_buffers(spec.module, but=unkept)))
    by_batch = replace(spec, module=use_batch(spec.module))
    measure, evaluate, families = dict[str, Exchange](), dict[str, Exchange](), dict[str, str]()
    variances, sizes = dict[str, str](), dict[str, dict[str, Tensor]]()
    for name, tier in tiers.items():
        family = families[name] = family_of(name, tier.submodel)
        algorithm, unit = tier.algorithm, unit_of(family)
        pairs = _pairs(algorithm.evaluate, names)
        own = [*pairs.values(), *pairs]
        variances |= pairs
        for each in own:
            values = torch.ones if each in pairs else torch.zeros
            sizes.setdefault(family, {})[each] = values(algorithm.evaluate.inputs[f"weights.{each}"].shape)
        prefix = tiers_of(federation, by_batch, [name])[name].prefix if tier.prefix else ()
        measure[name] = Exchange(NORMS, norm_statistics(algorithm, pairs), (), prefix=prefix)
        reading = replace(algorithm, evaluate=reads_statistics(algorithm.evaluate, own, unit))
        frozen = _reading(tier, names, unit)
        for port in [port for chunk in frozen for port in chunk.forward.inputs.items()]:
            # No device of this tier measures these. The family is incomplete unless another tier's devices do.
            if port[0].startswith(start := f"weights.{unit}."):
                sizes.setdefault(family, {}).setdefault(
                    port[0].removeprefix(start), torch.ones(port[1].shape)
                )
        fetched = (unit,) if own else ()
        evaluate[name] = Exchange(EVALUATE, evaluation(reading), (), fetched=fetched, prefix=frozen)
    if not variances:
        return None
    families = {tier: family for tier, family in families.items() if family in sizes}
    initial = {f"{unit_of(family)}.{MEASURED}": torch.tensor(-1.0) for family in sizes}
    for family, tensors in sizes.items():
        initial |= {f"{unit_of(family)}.{name}": tensor for name, tensor in tensors.items()}
    arrays = {name: tensor.numpy() for name, tensor in initial.items()}
    return NormMeasurement(measure, evaluate, families, variances, arrays)


def _pairs(evaluate: Function, names: Collection[str]) -> dict[str, str]:
    """Return the statistics among ``names`` that layers of ``evaluate`` read: each variance with its mean."""
    inputs = evaluate.example(0)
    moving = {name: tensor for name, tensor in select(inputs, "weights").items() if name in names}
    mode = MomentsMode(moving, torch.ones_like(inputs["batch.0.mask"]))
    with torch.no_grad(), mode:
        evaluate.fn(inputs | prefixed("weights", moving))
    return mode.variances


def _reading(tier: TierTraining, names: Collection[str], unit: str) -> tuple[ChunkForward, ...]:
    """Return the frozen units of ``tier`` in chunks that read the statistics ``names`` from the published ``unit``.

    ``unit`` is the name under which the server publishes the statistics.
    """
    chunks = []
    for chunk in tier.prefix:
        forward = reads_statistics(chunk.forward, names, unit)
        reads = forward.inputs.keys() != chunk.forward.inputs.keys()
        chunks.append(ChunkForward((*chunk.units, unit) if reads else chunk.units, forward))
    return tuple(chunks)

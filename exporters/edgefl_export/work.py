"""How much a round computes."""

from __future__ import annotations

import math

from edgefl.contract.algorithm import Algorithm, Phase
from edgefl.submodels.cost import RoundCost
from edgefl_export.bundle.build import batch_size


def round_work(algorithm: Algorithm, found: RoundCost, samples: int = 0) -> int:
    """Multiplications of a round on ``samples`` rows; 0: as many as the round's steps draw.

    A phase over the data counts as training on every row once, in whole batches, whatever its ``steps`` say.
    """
    rows = batch_size(algorithm) * sum(phase.steps for phase in algorithm.phases if not phase.over_data)
    samples = samples or rows
    passed = [_in_whole_batches(samples, phase) for phase in algorithm.phases if phase.over_data]
    return found.round_macs(batch=1, steps=rows + sum(passed), samples=samples)


def _in_whole_batches(samples: int, phase: Phase) -> int:
    """The rows of one pass: the last batch is filled up, and there is one at least."""
    ports = phase.function.inputs.items()
    rows = next(spec.shape[0] for name, spec in ports if name.startswith("batch.0."))
    return max(1, math.ceil(samples / rows)) * rows

"""One client's round in torch, from an algorithm's own functions: what every device runtime must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.tensors import Tensors, prefixed, role_of, select
from edgefl.wire.bundle.manifest import SAMPLE

# (step function, step over all phases) -> its batch.* and noise.* inputs.
Feed = Callable[[Function, int], Tensors]
Samples = Mapping[str, Tensor]
"""A client's samples by the parts of a batch: rows ``x``, labels ``y``, and the inputs beside x."""


@dataclass(frozen=True)
class RoundResult:
    """What a device returns (``update``), keeps (``carry``) and reports (``metrics``, one dict per step)."""

    update: Tensors
    carry: Tensors
    metrics: tuple[Tensors, ...]


def multi_step_forward(
    chunks: Sequence[Function],
    weights: Mapping[str, Tensor],
    x: Tensor,
    others: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """EmbracingFL Algorithm 1: the record of all rows of ``x`` (n, *sample), one row per sample, in order.

    ``chunks`` come from :func:`edgefl.algorithms.submodels.frozen_forward.chunk_forward`. Rows go through in
    consecutive groups of the
    chunk's batch; the last group is filled by wrap-around (rows 0, 1, ...), which matters for static batch norm. ``others``
    are the inputs beside x, by name.
    """
    record, beside = x, {SAMPLE: x, **(others or {})}
    for chunk in chunks:
        named = _weights_of(chunk, weights)
        size = chunk.inputs["batch.0.x"].shape[0]
        groups = torch.arange(-(-len(x) // size) * size).remainder(len(x)).view(-1, size)
        read = {
            "x": record,
            **{name: each for name, each in beside.items() if f"batch.0.{name}" in chunk.inputs},
        }
        outputs = [chunk(named | prefixed("batch.0", _rows(read, rows)))["record.x"] for rows in groups]
        record = torch.cat(outputs)[: len(x)]
    return record


def run_round(
    algorithm: Algorithm,
    weights: Mapping[str, Tensor],
    feed: Feed,
    *,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Tensor] | None = None,
    samples: Samples | None = None,
) -> RoundResult:
    """``start``, every phase's steps, ``finish``; ``feed`` gives each step its batches and noise, ``finish`` its noise.

    ``weights`` may be the whole model's, with the server's state beside it; scalars have their dtype. ``hyper``
    overrides the algorithm's defaults; ``carry`` is what the previous round left, zeros where it left nothing. ``samples``
    are those that a phase over the data passes through.
    """
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    scalars = {
        name: torch.tensor(value, dtype=dtype) for name, value in {**algorithm.hyper, **(hyper or {})}.items()
    }
    ports = {**algorithm.start.inputs, **algorithm.finish.inputs}
    carry_inputs = {name: spec.zeros(dtype) for name, spec in ports.items() if role_of(name) == "carry"}
    carry_inputs |= prefixed("carry", carry or {})
    common = prefixed("hyper", scalars) | carry_inputs | prefixed("weights", weights)
    state, step, metrics = _role("state", _run(algorithm.start, common)), 0, []
    for phase in algorithm.phases:
        for inputs in _inputs(phase, step, feed, samples):
            out = _run(phase.function, common | state | inputs)
            state = state | _role("state", out)
            metrics.append(select(out, "metric"))
            step += 1
    draws = any(role_of(name) == "noise" for name in algorithm.finish.inputs)
    final = _run(algorithm.finish, common | state | (feed(algorithm.finish, step) if draws else {}))
    return RoundResult(select(final, "update"), select(final, "carry"), tuple(metrics))


def _inputs(phase: Phase, step: int, feed: Feed, samples: Samples | None) -> Iterator[Tensors]:
    """What feeds each step of a phase, the first of which is number ``step``."""
    if not phase.over_data:
        for number in range(step, step + phase.steps):
            yield feed(phase.function, number)
        return
    if samples is None:
        raise ValueError(f"phase {phase.name!r} passes over the data; give run_round the samples")
    count, size = len(samples["y"]), phase.function.inputs["batch.0.x"].shape[0]
    for first in range(0, count, size):
        rows = torch.arange(first, first + size)
        dtype = samples["x"].dtype if samples["x"].is_floating_point() else torch.float32
        batch = {**_rows(samples, rows.remainder(count)), "mask": (rows < count).to(dtype)}
        yield feed(phase.function, step + first // size) | prefixed("batch.0", batch)


def _rows(parts: Samples, rows: Tensor) -> Tensors:
    return {name: tensor[rows] for name, tensor in parts.items()}


def _run(function: Function, available: Mapping[str, Tensor]) -> Tensors:
    return function({name: available[name] for name in function.inputs})


def _weights_of(function: Function, weights: Mapping[str, Tensor]) -> Tensors:
    return {name: weights[name.partition(".")[2]] for name in function.inputs if role_of(name) == "weights"}


def _role(role: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if role_of(name) == role}

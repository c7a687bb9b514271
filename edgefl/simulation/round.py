"""One client's round in torch, from a program's own functions: what every device runtime must reproduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgefl.programs.contract import Function, Program, Tensors, prefixed, role_of, select

# (step function, step over all phases) -> its batch.* and noise.* inputs.
Feed = Callable[[Function, int], Tensors]


@dataclass(frozen=True)
class RoundResult:
    """What a device returns (``update``), keeps (``carry``) and reports (``metrics``, one dict per step)."""

    update: Tensors
    carry: Tensors
    metrics: tuple[Tensors, ...]


def multi_step_forward(chunks: Sequence[Function], weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """EmbracingFL Algorithm 1: the record of all rows of ``x`` (n, *sample), one row per sample, in order.

    ``chunks`` come from :func:`edgefl.programs.forward.chunk_forward`. Rows go through in consecutive groups of the
    chunk's batch; the last group is filled by wrap-around (rows 0, 1, ...), which matters for static batch norm.
    """
    record = x
    for chunk in chunks:
        named = _weights_of(chunk, weights)
        size = chunk.inputs["batch.0.x"].shape[0]
        groups = torch.arange(-(-len(x) // size) * size).remainder(len(x)).view(-1, size)
        outputs = [chunk(named | {"batch.0.x": record[rows]})["record.x"] for rows in groups]
        record = torch.cat(outputs)[: len(x)]
    return record


def run_round(
    program: Program,
    weights: Mapping[str, Tensor],
    feed: Feed,
    *,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Tensor] | None = None,
) -> RoundResult:
    """``start``, every phase's steps, ``finish``; ``feed`` gives each step its batches and noise, ``finish`` its noise.

    ``weights`` may be the whole model's; ``hyper`` overrides the program's defaults; ``carry`` is what the
    previous round left, zeros where it left nothing.
    """
    scalars = {name: torch.tensor(value) for name, value in {**program.hyper, **(hyper or {})}.items()}
    ports = {**program.start.inputs, **program.finish.inputs}
    kept = {name: spec.zeros() for name, spec in ports.items() if role_of(name) == "carry"}
    kept |= prefixed("carry", carry or {})
    common = prefixed("hyper", scalars) | kept | prefixed("weights", weights)
    state, step, metrics = _role("state", _run(program.start, common)), 0, []
    for phase in program.phases:
        for _ in range(phase.steps):
            out = _run(phase.function, common | state | feed(phase.function, step))
            state = state | _role("state", out)
            metrics.append(select(out, "metric"))
            step += 1
    draws = any(role_of(name) == "noise" for name in program.finish.inputs)
    final = _run(program.finish, common | state | (feed(program.finish, step) if draws else {}))
    return RoundResult(select(final, "update"), select(final, "carry"), tuple(metrics))


def _run(function: Function, available: Mapping[str, Tensor]) -> Tensors:
    return function({name: available[name] for name in function.inputs})


def _weights_of(function: Function, weights: Mapping[str, Tensor]) -> Tensors:
    return {name: weights[name.partition(".")[2]] for name in function.inputs if role_of(name) == "weights"}


def _role(role: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if role_of(name) == role}

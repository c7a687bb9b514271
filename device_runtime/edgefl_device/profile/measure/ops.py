"""Costliest ops and phases of a training step, from measured node times or from estimated work."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.wire.bundle.profiles import OPS, CallTimes, How, OpCost, StageTimes
from edgefl.wire.bundle.sources import OpOrigin, Phase

BYTES_PER_MAC = 4.0
"""Multiplications that take as long as moving one byte; only for estimates."""

_NAME = re.compile(r"[A-Za-z]+_\d+")


@dataclass(frozen=True)
class NodeTime:
    """Milliseconds of one node in one call. The engine may have renamed or fused nodes."""

    name: str
    op: str
    ms: float


@dataclass(frozen=True)
class Trace:
    """Times of one call, and the memory that it took.

    Attributes:
        nodes: Milliseconds of each node, in the order of execution.
        engine_bytes: Most bytes of the engine's arena; 0 if unknown.
        instructions: True if ``nodes`` are instructions of a program, each of which may run several nodes.
    """

    nodes: tuple[NodeTime, ...]
    engine_bytes: int
    instructions: bool = False


@dataclass(frozen=True)
class TimeShare:
    """Share (0..1) of a call's time that one op takes; ``node`` is its node in the bundle, None if unknown."""

    op: str
    share: float
    node: OpOrigin | None


def measured(timed: Iterable[NodeTime], nodes: Mapping[str, OpOrigin]) -> list[TimeShare]:
    """Return each node's share of the measured time, for the times ``timed`` by the engine.

    A fused node counts as the first known node in its name.
    """
    timed = list(timed)
    total = sum(each.ms for each in timed) or 1.0
    return [TimeShare(each.op, each.ms / total, _known(each.name, nodes)) for each in timed]


def estimated(nodes: Mapping[str, OpOrigin]) -> list[TimeShare]:
    """Return an estimate of each node's share of a call's time, for engines that do not time nodes.

    A node's share is proportional to its multiplications plus its moved bytes, weighted.
    """
    total = sum(map(_work, nodes.values())) or 1.0
    return [TimeShare(node.op, _work(node) / total, node) for node in nodes.values()]


def by_instruction(nodes: Mapping[str, OpOrigin]) -> dict[int, dict[str, OpOrigin]]:
    """Return the nodes by the number of the first instruction that runs them, the prefix of their names (``12:mul_3``).

    Return {} if names have no such prefix.
    """
    groups: dict[int, dict[str, OpOrigin]] = {}
    for name, node in nodes.items():
        first, colon, _ = name.partition(":")
        if not colon or not first.isdigit():
            return {}
        groups.setdefault(int(first), {})[name] = node
    return dict(sorted(groups.items()))


def shared(timed: Sequence[NodeTime], groups: Mapping[int, Mapping[str, OpOrigin]]) -> list[TimeShare]:
    """Return each node's share: the measured time of an instruction, divided among its nodes as :func:`estimated` does.

    The time of an instruction without nodes of its own, such as a copy, counts for the instruction before it.

    Args:
        timed: Time of each instruction, in the program's order.
        groups: Nodes by name, by the number of the instruction that runs them.
    """
    total = sum(each.ms for each in timed) or 1.0
    firsts = list(groups)
    took = dict.fromkeys(firsts, 0.0)
    for at, each in enumerate(timed):
        took[firsts[max(0, bisect_right(firsts, at) - 1)]] += each.ms / total
    return [
        TimeShare(part.op, took[first] * part.share, part.node)
        for first in firsts
        for part in estimated(groups[first])
    ]


def _work(node: OpOrigin) -> float:
    return max(1.0, node.macs + BYTES_PER_MAC * node.nbytes)


def split(parts: Iterable[TimeShare], run: CallTimes, how: How) -> StageTimes | None:
    """Return the time of a call by phase: forward, backward and update. Return None if the phase of no node is known.

    The time of nodes with unknown phase is distributed proportionally.

    Args:
        parts: Share of each node in the call's time.
        run: Measured times of the whole call.
        how: Origin of the shares, such as ``measured`` or ``estimated``.
    """
    shares: dict[Phase, float] = {}
    for part in parts:
        if part.node is not None:
            shares[part.node.phase] = shares.get(part.node.phase, 0.0) + part.share
    total = sum(shares.values())
    if not total:
        return None

    def spent(phase: Phase, call_ms: float) -> float:
        return round(call_ms * shares.get(phase, 0.0) / total, 4)

    return StageTimes(
        forward_ms=spent("forward", run.median_ms),
        backward_ms=spent("backward", run.median_ms),
        update_ms=spent("update", run.median_ms),
        how=how,
        forward_p90_ms=spent("forward", run.p90_ms),
        backward_p90_ms=spent("backward", run.p90_ms),
        update_p90_ms=spent("update", run.p90_ms),
    )


def costliest(parts: Iterable[TimeShare], median_ms: float, how: How) -> tuple[OpCost, ...]:
    """Return the ops with the largest time, summed over equal op, module and phase; the costliest first.

    Args:
        parts: Share of each node in the call's time.
        median_ms: Time of the call in milliseconds.
        how: Origin of the shares, such as ``measured`` or ``estimated``.
    """
    groups: dict[tuple[str, str, str], list[TimeShare]] = {}
    for part in parts:
        where = (part.node.module, part.node.phase) if part.node else ("", "")
        groups.setdefault((part.op, *where), []).append(part)
    shares = {key: sum(part.share for part in group) for key, group in groups.items()}
    most = sorted(shares, key=lambda key: (-shares[key], key))[:OPS]
    return tuple(
        OpCost(
            op=key[0],
            module=key[1],
            phase=key[2],
            ms=round(median_ms * shares[key], 4),
            share=round(shares[key], 6),
            macs=sum(part.node.macs for part in groups[key] if part.node),
            how=how,
        )
        for key in most
    )


def _known(name: str, nodes: Mapping[str, OpOrigin]) -> OpOrigin | None:
    matches = (nodes[each] for each in [name, *_NAME.findall(name)] if each in nodes)
    return next(matches, None)

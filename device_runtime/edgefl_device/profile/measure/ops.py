"""Costliest ops and parts of a training step, from the times of nodes or from the work that they compute."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgefl.wire.bundle.profiles import OPS, CallTimes, How, OpCost, StepSplit
from edgefl.wire.bundle.sources import Node, Phase

BYTES_PER_MAC = 4.0
"""Multiplications that take as long as moving one byte; only for estimates."""

_NAME = re.compile(r"[A-Za-z]+_\d+")


@dataclass(frozen=True)
class NodeTime:
    """A node as the engine ran it, which may have renamed it or fused several: milliseconds of one call."""

    name: str
    op: str
    ms: float


@dataclass(frozen=True)
class Trace:
    """The nodes of a call, and the most that the engine's arena held (0: unknown).

    ``instructions``: the nodes are instructions of a program, each of which may run many nodes, in its order.
    """

    nodes: tuple[NodeTime, ...]
    engine_bytes: int
    instructions: bool = False


@dataclass(frozen=True)
class TimeShare:
    """Share (0..1) of a call's time, and its op; ``node`` is None if it is unknown."""

    op: str
    share: float
    node: Node | None


def measured(timed: Iterable[NodeTime], nodes: Mapping[str, Node]) -> list[TimeShare]:
    """Return the parts by the engine's own times. A fused node counts as the first one in its name that the bundle
    knows."""
    timed = list(timed)
    total = sum(each.ms for each in timed) or 1.0
    return [TimeShare(each.op, each.ms / total, _known(each.name, nodes)) for each in timed]


def estimated(nodes: Mapping[str, Node]) -> list[TimeShare]:
    """Return the parts by multiplications and bytes moved, for an engine that does not time its nodes."""
    total = sum(map(_work, nodes.values())) or 1.0
    return [TimeShare(node.op, _work(node) / total, node) for node in nodes.values()]


def by_instruction(nodes: Mapping[str, Node]) -> dict[int, dict[str, Node]]:
    """Return the nodes by the first of the instructions that run them, with which their names begin (``12:mul_3``);
    empty if they do not."""
    groups: dict[int, dict[str, Node]] = {}
    for name, node in nodes.items():
        first, colon, _ = name.partition(":")
        if not colon or not first.isdigit():
            return {}
        groups.setdefault(int(first), {})[name] = node
    return dict(sorted(groups.items()))


def shared(timed: Sequence[NodeTime], groups: Mapping[int, Mapping[str, Node]]) -> list[TimeShare]:
    """Return the parts by the time of each instruction, shared out to the nodes that it runs as :func:`estimated` does.

    An instruction without nodes of its own, such as a copy, is of those before it.
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


def _work(node: Node) -> float:
    return max(1.0, node.macs + BYTES_PER_MAC * node.nbytes)


def split(parts: Iterable[TimeShare], run: CallTimes, how: How) -> StepSplit | None:
    """Return a call's time by phase; parts of unknown origin share theirs with the known. None if none is known."""
    shares: dict[Phase, float] = {}
    for part in parts:
        if part.node is not None:
            shares[part.node.phase] = shares.get(part.node.phase, 0.0) + part.share
    total = sum(shares.values())
    if not total:
        return None

    def spent(phase: Phase, call_ms: float) -> float:
        return round(call_ms * shares.get(phase, 0.0) / total, 4)

    return StepSplit(
        forward_ms=spent("forward", run.median_ms),
        backward_ms=spent("backward", run.median_ms),
        update_ms=spent("update", run.median_ms),
        how=how,
        forward_p90_ms=spent("forward", run.p90_ms),
        backward_p90_ms=spent("backward", run.p90_ms),
        update_p90_ms=spent("update", run.p90_ms),
    )


def costliest(parts: Iterable[TimeShare], median_ms: float, how: How) -> tuple[OpCost, ...]:
    """Return the ops that take most of a call, those of one kind, module and phase together."""
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


def _known(name: str, nodes: Mapping[str, Node]) -> Node | None:
    matches = (nodes[each] for each in [name, *_NAME.findall(name)] if each in nodes)
    return next(matches, None)

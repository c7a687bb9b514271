"""Whom a round selects, how many, and of how many devices it may be expected to have its reports. Pure functions over the
coordinator's state; what is drawn follows from the federation's seed."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from edgefl_server.coordinator import roster
from edgefl_server.coordinator.record import NOBODY
from edgefl_server.coordinator.states import Rules, State


def goal_of(rules: Rules, count: int) -> int:
    """Reports that a round aims for, of ``count`` devices."""
    return max(1, rules.min_reports, roster.share(rules.fraction, count))


def chosen(rules: Rules, state: State, names: Sequence[str]) -> list[str]:
    """The devices of the next round, out of ``names``, sorted."""
    number, selection = state.next_round, rules.selection
    if selection.policy == "tiers":
        tiers = {name: state.devices[name].tier for name in names}
        counts = _by_quota(rules, state, Counter(tiers.values()))
        return sorted(
            name
            for tier, count in counts.items()
            for name in roster.sample(rules.seed, number, [n for n in names if tiers[n] == tier], count)
        )
    count = _how_many(rules, state, names)
    if selection.policy == "uniform":
        return roster.sample(rules.seed, number, names, count)
    place, record = roster.places(rules.seed, number), state.record.of
    return sorted(
        heapq.nsmallest(count, names, key=lambda name: (record.get(name, NOBODY).last, place(name)))
    )


def needed(rules: Rules, state: State) -> int:
    """Devices of which a round may be expected to have its ``min_reports``, with the probability that the rules ask for."""
    least = max(1, rules.min_reports)
    if not rules.selection.quorum:
        return least
    return trials(least, _bounded(rules, state.record.lost_share()), rules.selection.quorum)


@lru_cache(1024)
def trials(wanted: int, lost: float, probability: float) -> int:
    """The least number of tasks of which ``wanted`` are answered with ``probability`` or more, where each is lost with
    probability ``lost`` (below 1), whatever becomes of the others: a quantile of the negative binomial distribution."""
    if lost <= 0.0:
        return wanted
    # Its logarithm: 0.5 ** 2000 is no float.
    log_term, total, extra = wanted * math.log1p(-lost), 0.0, 0
    while True:
        total += math.exp(log_term)
        if total >= probability:
            return wanted + extra
        extra += 1
        log_term += math.log(lost * (wanted + extra - 1) / extra)


def seats(weights: Mapping[str, float], room: Mapping[str, int], count: int) -> dict[str, int]:
    """``count`` seats dealt to the names of ``room``, by their weights and no more than there is room for (highest averages,
    divisors 1, 3, 5...). A name without a weight is dealt what the others have no room for."""
    dealt = dict.fromkeys(sorted(room), 0)
    queue = [(-weights.get(name, 0.0), 0, name) for name in dealt if room[name]]
    heapq.heapify(queue)
    for _ in range(min(count, sum(room.values()))):
        _, held, name = heapq.heappop(queue)
        dealt[name] = held + 1
        if held + 1 < room[name]:
            heapq.heappush(queue, (-weights.get(name, 0.0) / (2 * held + 3), held + 1, name))
    return dealt


def _how_many(rules: Rules, state: State, names: Sequence[str]) -> int:
    """Devices that are selected of ``names``, where all tiers are chosen from alike."""
    goal, factor = goal_of(rules, len(names)), rules.over_selection
    if rules.selection.measured and state.record.turnouts:
        holders = Counter(state.devices[name].tier for name in names)
        answering = sum(count * (1.0 - _lost(rules, state, tier)) for tier, count in sorted(holders.items()))
        factor = len(names) / answering if answering else factor
    return max(goal, roster.share(rules.fraction * factor, len(names)), _safe(rules, state, len(names)))


def _by_quota(rules: Rules, state: State, room: Mapping[str, int]) -> dict[str, int]:
    """Devices that are selected of each tier."""
    total, selection = sum(room.values()), rules.selection
    weights = dict(selection.quotas) or dict.fromkeys(room, 1.0)
    wanted = seats(weights, room, max(goal_of(rules, total), _safe(rules, state, total)))
    measured = selection.measured and bool(state.record.turnouts)
    factors = {
        tier: 1.0 / (1.0 - _lost(rules, state, tier)) if measured else rules.over_selection for tier in room
    }
    return {tier: min(room[tier], math.ceil(count * factors[tier] - 1e-9)) for tier, count in wanted.items()}


def _safe(rules: Rules, state: State, most: int) -> int:
    """Devices that are selected at least, where a quorum is to be likely."""
    return min(most, needed(rules, state)) if rules.selection.quorum else 0


def _lost(rules: Rules, state: State, tier: str) -> float:
    """The share of tasks of a tier that is lost; that of all tiers where nothing is known of this one."""
    share = state.record.lost_share(tier)
    return _bounded(rules, state.record.lost_share() if share is None else share)


def _bounded(rules: Rules, lost: float | None) -> float:
    return min(lost or 0.0, 1.0 - 1.0 / rules.selection.most_over_selection)

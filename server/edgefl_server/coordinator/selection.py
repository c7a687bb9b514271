"""Selection of a round's devices: how many, which, and how many are needed for its reports. Pure functions."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from edgefl_server.coordinator import rollout, roster
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.record import NOBODY
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.coordinator.states import Rules, State


def goal_of(rules: Rules, count: int) -> int:
    """Return the number of accepted updates that closes a round with ``count`` candidate devices."""
    return max(1, rules.min_reports, roster.share(rules.fraction, count))


def select_devices(rules: Rules, state: State, names: Sequence[str]) -> list[str]:
    """Return the names of those of the candidates ``names`` that the next round selects, sorted.

    Their number and choice follow the rules: policy, fraction, and over-selection for lost tasks.
    """
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
    """Return the number of devices that must be present before a round opens.

    With a quorum, a round of that many devices gets ``min_reports`` updates with the probability ``quorum``, if
    devices fail as often as in the last rounds. Otherwise it is ``min_reports``.
    """
    least = max(1, rules.min_reports)
    if not rules.selection.quorum:
        return least
    return trials(least, _limit_share(rules, state.record.lost_share()), rules.selection.quorum)


@lru_cache(1024)
def trials(wanted: int, lost: float, probability: float) -> int:
    """Return the smallest number of tasks of which at least ``wanted`` are answered with this ``probability``.

    Args:
        wanted: Number of answers.
        lost: Probability that a task is lost, independently of the others.
        probability: Required probability.
    """
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
    """Return the number of seats of each name, where ``count`` seats are divided by weight (highest averages,
    D'Hondt).

    If ``room`` has fewer seats in total, all of them are given.

    Args:
        weights: Weight of each name.
        room: Largest number of seats of each name.
        count: Number of seats.
    """
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
    """Return the number of the candidates ``names`` to select, for policies without quotas by tier.

    It is larger than the goal if tasks are expected to be lost.
    """
    goal, factor = goal_of(rules, len(names)), rules.over_selection
    if rules.selection.measured and state.record.turnouts:
        holders = Counter(state.devices[name].tier for name in names)
        answering = sum(count * (1.0 - _lost(rules, state, tier)) for tier, count in sorted(holders.items()))
        factor = len(names) / answering if answering else factor
    return max(goal, roster.share(rules.fraction * factor, len(names)), _safe(rules, state, len(names)))


def _by_quota(rules: Rules, state: State, room: Mapping[str, int]) -> dict[str, int]:
    """Return the number of devices to select from each tier, by tier, for the policy ``tiers``.

    ``room`` is the number of candidates by tier.
    """
    total, selection = sum(room.values()), rules.selection
    weights = dict(selection.quotas) or dict.fromkeys(room, 1.0)
    wanted = seats(weights, room, max(goal_of(rules, total), _safe(rules, state, total)))
    measured = selection.measured and bool(state.record.turnouts)
    factors = {
        tier: 1.0 / (1.0 - _lost(rules, state, tier)) if measured else rules.over_selection for tier in room
    }
    return {tier: min(room[tier], math.ceil(count * factors[tier] - 1e-9)) for tier, count in wanted.items()}


def _safe(rules: Rules, state: State, most: int) -> int:
    """Return the smallest number of devices that gets ``min_reports`` with the required probability, at most ``most``.

    It is 0 if the rules have no quorum.
    """
    return min(most, needed(rules, state)) if rules.selection.quorum else 0


def _lost(rules: Rules, state: State, tier: str) -> float:
    """Return the share of tasks of ``tier`` that brought no update in the last rounds.

    If no task of the tier has a known result, it is the share over all tiers. It is bounded so that a round selects at
    most ``most_over_selection`` times the wanted devices.
    """
    share = state.record.lost_share(tier)
    return _limit_share(rules, state.record.lost_share() if share is None else share)


def _limit_share(rules: Rules, lost: float | None) -> float:
    return min(lost or 0.0, 1.0 - 1.0 / rules.selection.most_over_selection)


def assign(
    rules: Rules, state: State, number: int, device: RosterEntry, *, turn: int = 0, until: float = 0.0
) -> Assignment:
    """Return a new task that begins from the model of round ``number``.

    Args:
        rules: Rules of the run.
        state: State of the coordinator.
        number: Number of the round.
        device: Device that gets the task.
        turn: Number of the device's task in that round, if there are several.
        until: End of the task's time in epoch seconds, in asynchronous rounds.
    """
    rows = min(device.samples, rules.samples or device.samples, rules.most_samples)
    return Assignment(
        device.name,
        rollout.tier_for(rules.rollout, state.trial, device),
        roster.task_seed(rules.seed, number, device.name, turn),
        roster.task_nonce(rules.run, rules.seed, number, device.name, turn),
        weight_limit=max(1, rows) if rules.weighted else 1,
        round=number,
        until=until,
    )

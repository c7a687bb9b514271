"""Trial of a candidate: a share of each tier's devices train with another bundle and are compared with the others.

The candidate is then promoted for all devices of its tiers, or taken back. Pure data and functions.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from edgefl_server.coordinator import roster
from edgefl_server.coordinator.fleet import Devices
from edgefl_server.coordinator.record import Turnout
from edgefl_server.coordinator.roster import CANDIDATE, RosterEntry, base_of

LEAST_TASKS = 10
"""Number of the candidate's tasks after which its failures may end the trial early. A candidate that crashes devices
should not run for all rounds of a trial."""

Verdict = Literal["", "promoted", "taken back"]


@dataclass(frozen=True)
class RolloutRules:
    """Trial of a candidate bundle: table ``rollout`` of a federation file.

    Attributes:
        seed: Seed of the federation.
        tiers: Tiers with a candidate.
        share: Share of their devices that try it.
        rounds: Length of the trial.
        most_loss_increase: Largest increase of the training loss, relative to the other devices of the tier.
        most_failures: Largest increase of the share of lost tasks.
        most_slowdown: Largest multiple of the training time.
    """

    seed: int
    tiers: tuple[str, ...]
    share: float
    rounds: int
    most_loss_increase: float
    most_failures: float
    most_slowdown: float


class ReportMedians(msgspec.Struct, frozen=True, array_like=True):
    """Medians over the accepted updates of a tier in one round.

    Attributes:
        loss: Training loss; None if no update reports a loss.
        train_ms: Milliseconds of all local steps; None if no update reports them.
    """

    loss: float | None
    train_ms: float | None


class TrialArm(msgspec.Struct, frozen=True, array_like=True):
    """Results of one side of a trial: a tier with its present bundle, or with the candidate.

    Attributes:
        tasks: Number of tasks.
        lost: Number of tasks without an update.
        reports: Medians of the updates, one entry per round that had some.
    """

    tasks: int = 0
    lost: int = 0
    reports: tuple[ReportMedians, ...] = ()

    @property
    def lost_share(self) -> float:
        """Share of the tasks without an update; 0 without tasks."""
        return self.lost / self.tasks if self.tasks else 0.0

    def mean(self, name: str) -> float | None:
        """Return the mean over the rounds of the medians ``name`` (``loss`` or ``train_ms``); None if no round has a
        value.
        """
        values = [value for each in self.reports if (value := getattr(each, name)) is not None]
        return statistics.fmean(values) if values else None


class Trial(msgspec.Struct, frozen=True):
    """State of the trial of a candidate bundle.

    A lot number is a device's fixed random number (:func:`lot`).

    Attributes:
        began: First round of the trial.
        marks: By tier, the highest lot number that uses the candidate.
        rounds: Number of completed rounds.
        arms: Figures by tier, and by candidate under the tier's name with the suffix ``@candidate``.
        verdict: ``promoted`` or ``taken back``; empty while the trial continues.
        text: Reason of the verdict.
    """

    began: int
    marks: dict[str, str]
    rounds: int = 0
    arms: dict[str, TrialArm] = {}
    verdict: Verdict = ""
    text: str = ""


def begin_trial(rollout: RolloutRules, number: int, devices: Devices, names: Iterable[str]) -> Trial:
    """Return a trial that begins with round ``number``.

    In each tier of ``rollout``, its share of the devices ``names`` (rounded up) uses the candidate. At least one keeps
    the present bundle. A device that appears later is assigned by its lot number.
    """
    lots: dict[str, list[str]] = {tier: [] for tier in rollout.tiers}
    for name in names:
        if (tier := devices[name].tier) in lots:
            lots[tier].append(lot(rollout.seed, name))
    return Trial(number, {tier: _mark(rollout.share, sorted(own)) for tier, own in lots.items()})


def _mark(share: float, lots: list[str]) -> str:
    """Return the highest lot number (of the sorted ``lots``) of a device that uses the candidate bundle.

    ``share`` is the fraction of devices that use it. It is an empty text if no device does.
    """
    count = min(roster.share(share, len(lots)), len(lots) - 1)
    return lots[count - 1] if count > 0 else ""


def lot(seed: int, name: str) -> str:
    """Return the lot number of device ``name``, which decides whether it tries a candidate bundle.

    It has 16 hexadecimal digits, which are compared as text, and stays the same for the whole trial.
    """
    return hashlib.sha256(f"rollout/{seed}/{name}".encode()).hexdigest()[:16]


def tier_for(rollout: RolloutRules | None, trial: Trial | None, device: RosterEntry) -> str:
    """Return the tier of a device's next task, with the suffix ``@candidate`` if the device uses the candidate bundle.

    ``rollout`` and ``trial`` are None if the federation has no candidate.
    """
    if rollout is None or trial is None or device.tier not in rollout.tiers or trial.verdict == "taken back":
        return device.tier
    tries = trial.verdict == "promoted" or lot(rollout.seed, device.name) <= trial.marks.get(device.tier, "")
    return device.tier + CANDIDATE if tries else device.tier


def count_round(
    rollout: RolloutRules, trial: Trial, turnout: Mapping[str, Turnout], reports: Mapping[str, ReportMedians]
) -> Trial:
    """Return ``trial`` with the figures of one more round, and with a verdict if one can be given.

    Args:
        rollout: Options of the trial.
        trial: The trial before the round.
        turnout: Tasks and lost tasks of the round, by tier. A candidate's tier has the suffix ``@candidate``.
        reports: Medians of the round's accepted updates, by the same tier names.
    """
    arms = dict(trial.arms)
    for tier in {*turnout, *reports}:
        if base_of(tier) in rollout.tiers:
            before, counts = arms.get(tier, TrialArm()), turnout.get(tier, Turnout(0, 0))
            new = (reports[tier],) if tier in reports else ()
            arms[tier] = TrialArm(
                before.tasks + counts.tasks, before.lost + counts.lost, (*before.reports, *new)
            )
    after = msgspec.structs.replace(trial, rounds=trial.rounds + 1, arms=arms)
    verdict, text = judge(rollout, after)
    return msgspec.structs.replace(after, verdict=verdict, text=text)


def judge(rollout: RolloutRules, trial: Trial) -> tuple[Verdict, str]:
    """Return (verdict on the candidate, reason for people). Both are empty while the trial continues.

    The verdict is ``promoted``, or ``taken back`` if a bound of ``rollout`` is exceeded or nothing can be compared.
    Too many lost tasks end the trial early.
    """
    old, new = _together(rollout, trial, ""), _together(rollout, trial, CANDIDATE)
    over = trial.rounds >= rollout.rounds
    if (over or new.tasks >= LEAST_TASKS) and new.lost_share > old.lost_share + rollout.most_failures:
        return "taken back", (
            f"{new.lost} of {new.tasks} tasks with the candidate gave no update, and {old.lost} of {old.tasks} without: the "
            f"share may be {rollout.most_failures:g} larger (rollout.most_failures)"
        )
    if not over:
        return "", ""
    compared = []
    for tier in rollout.tiers:
        before, after = trial.arms.get(tier, TrialArm()), trial.arms.get(tier + CANDIDATE, TrialArm())
        if not before.reports or not after.reports:
            continue
        if worse := _worse(rollout, tier, before, after):
            return "taken back", worse
        compared.append(f"{tier}: {_figures(before)} before, {_figures(after)} with it")
    if not compared:
        return (
            "taken back",
            "no tier has updates both with the candidate and without it, so nothing can be compared",
        )
    failures = f"{new.lost} of {new.tasks} tasks gave no update with it, {old.lost} of {old.tasks} without"
    return "promoted", f"{'; '.join(compared)}; {failures}"


def _together(rollout: RolloutRules, trial: Trial, side: str) -> TrialArm:
    arms = [trial.arms.get(tier + side, TrialArm()) for tier in rollout.tiers]
    return TrialArm(sum(arm.tasks for arm in arms), sum(arm.lost for arm in arms))


def _worse(rollout: RolloutRules, tier: str, before: TrialArm, after: TrialArm) -> str:
    """Return a text about the first bound that the candidate exceeds in ``tier``; empty if it exceeds none.

    ``before`` and ``after`` are the figures without and with the candidate.
    """
    old, new = before.mean("loss"), after.mean("loss")
    if old is not None and (new is None or new - old > rollout.most_loss_increase * abs(old)):
        found = "no finite loss" if new is None else f"a training loss of {new:.4g}"
        return (
            f"tier {tier!r} has {found} with the candidate and {old:.4g} without: it may be "
            f"{rollout.most_loss_increase:g} of that higher (rollout.most_loss_increase)"
        )
    slow, quick = after.mean("train_ms"), before.mean("train_ms")
    if slow is not None and quick and slow > rollout.most_slowdown * quick:
        return (
            f"tier {tier!r} trains {slow:.4g} ms a round with the candidate and {quick:.4g} without: it may take "
            f"{rollout.most_slowdown:g} times as long (rollout.most_slowdown)"
        )
    return ""


def _figures(arm: TrialArm) -> str:
    loss, train_ms = arm.mean("loss"), arm.mean("train_ms")
    parts = [
        f"loss {loss:.4g}" if loss is not None else "",
        f"{train_ms:.4g} ms" if train_ms is not None else "",
    ]
    return ", ".join(part for part in parts if part) or "no figures"

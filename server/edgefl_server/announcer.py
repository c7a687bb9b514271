"""What the service tells people by itself, each thing once: that it is up, whom it waits for, which round began."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

from edgefl.wire.mqtt.messages import Round, encode
from edgefl.wire.mqtt.neighbours import Neighbours, named
from edgefl_server import events
from edgefl_server.aggregate.robust import unprotected
from edgefl_server.coordinator.attendance import Presence, missing, presence
from edgefl_server.coordinator.rollout import Trial
from edgefl_server.coordinator.states import OpenRound, Outcome, Rules, State
from edgefl_server.coordinator.tier_names import CANDIDATE
from edgefl_server.run_spec import RunSpec

HOSTED_BYTES = 128 * 1024
"""What the strictest hosted brokers take in a message."""


_ONE_OF_MANY = re.compile(r"(?<=/devices/)[^/]+|(?<=/blobs/).*")


class Announcer:
    """Remembers what has been said, and says what is new to ``emit``."""

    def __init__(self, spec: RunSpec, rules: Rules, emit: Callable[[events.Event], None]) -> None:
        self._spec = spec
        self._rules = rules
        self._emit = emit
        self._waiting: Presence | None = None
        self._strangers: dict[str, Sequence[str]] = {}
        self._newcomers: set[str] = set()
        self._denied: set[str] = set()
        self._unprotected: set[tuple[str, int]] = set()

    def announced(self, message: Round | None) -> None:
        """That hosted brokers would not take the first announcement: it keeps about its size."""
        size = len(encode(message)) if message is not None else 0
        if not self._spec.message_limit and size > HOSTED_BYTES:
            text = (
                f"the announcement of a round takes {size} bytes; this broker has to take as much in a message, and hosted "
                f"ones take {HOSTED_BYTES}: fewer units or tiers make it smaller"
            )
            self._emit(events.Warned(tier="", text=text))

    def denied(self, topic: str, text: str) -> None:
        """What the broker will not do for us: the session goes on asking, as an access list may be mended. Of blobs and of
        devices, which are many, the first topic is told."""
        kind = _ONE_OF_MANY.sub("", topic)
        if kind not in self._denied:
            self._denied.add(kind)
            self._emit(events.Warned(tier="", text=text))

    def noted(self, text: str) -> None:
        """What is good to know, and nothing is wrong."""
        self._emit(events.Noted(text=text))

    def started(self, state: State, *, resumed: bool, device: str, server_key: str) -> None:
        self._emit(
            events.Started(
                federation=self._spec.federation,
                run=self._rules.run,
                rounds=self._rules.rounds,
                next_round=state.next_round,
                resumed=resumed,
                model_version=state.model_version,
                device=device,
                server_key=server_key,
            )
        )

    def opened(self, opened: OpenRound, trial: Trial | None = None) -> None:
        """``trial``: of a candidate, which may begin with this round."""
        self._emit(
            events.RoundOpened(
                round=opened.number,
                goal=opened.goal,
                devices=tuple(opened.assignments),
                deadline=opened.deadline,
            )
        )
        holders = Counter(assignment.tier for assignment in opened.assignments.values())
        if trial is not None and trial.began == opened.number:
            trying = {tier: holders[tier + CANDIDATE] for tier in trial.marks}
            self._emit(events.RolloutStarted(round=opened.number, devices=trying))
        rule = self._spec.aggregate.rule
        for tier, count in sorted(holders.items()):
            if unprotected(rule, count) and (tier, count) not in self._unprotected:
                self._unprotected.add((tier, count))
                text = (
                    f"the rule {rule.name} leaves nothing out of {count} updates of tier {tier!r}; raise aggregate.trim, or "
                    "give the tier more devices"
                )
                self._emit(events.Warned(tier=tier, text=text))

    def tried(self, number: int, trial: Trial) -> None:
        """Round ``number`` of a trial is over."""
        if trial.verdict:
            self._emit(
                events.RolloutJudged(round=number, promoted=trial.verdict == "promoted", text=trial.text)
            )

    def ended(self, state: State, round_: OpenRound, outcome: Outcome, text: str, now: float) -> None:
        """``round_`` took its last update at ``now``."""
        self._emit(
            events.RoundEnded(
                round=round_.number,
                outcome=outcome,
                reports=round_.count("accepted"),
                missing=missing(self._rules, state, round_, now),
                seconds=now - round_.opened,
                text=text,
            )
        )

    def waiting(self, state: State, now: float) -> None:
        """Whenever it waits for others than before."""
        if state.phase != "waiting":
            self._waiting = None
            return
        there = presence(self._rules, state, now)
        if there.known < there.needed and state.next_round <= self._rules.rounds and there != self._waiting:
            self._waiting = there
            self._emit(events.Waiting(next_round=state.next_round, **vars(there)))

    @property
    def lacks_devices(self) -> bool:
        """Whether the next round waits for devices."""
        return self._waiting is not None and self._waiting.known < self._waiting.needed

    def neighbours(self, state: State, seen: Neighbours) -> None:
        """Devices that no server trains may have come under a wrong name."""
        own = self._spec.federation
        strangers = seen.unserved(but=own)
        if not strangers or strangers == self._strangers or state.phase != "waiting":
            return
        self._strangers = strangers
        names = named([f"{name!r} ({named(devices)})" for name, devices in strangers.items()])
        text = (
            f"at this broker devices wait for a server of federation {names}; those that are meant for this one want "
            f"`edgefl device --federation {own}`"
        )
        self._emit(events.Warned(tier="", text=text))

    def newcomer(self, state: State, device: str, tier: str) -> None:
        """A device that no round will select before the method begins again."""
        if not tier or not state.members or device in state.members or device in self._newcomers:
            return
        self._newcomers.add(device)
        text = (
            f"device {device} came after the method began and has nothing of its earlier rounds, which the algorithm needs; "
            "it takes part if the method begins again"
        )
        self._emit(events.Warned(tier=tier, text=text))

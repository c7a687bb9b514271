"""What a device tells people of its place at the broker: who else is there, who takes its name, what tier it has not got."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from edgefl.system.clock import clock
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, client_id
from edgefl.wire.mqtt.events import Disconnected, Refusal
from edgefl.wire.mqtt.messages import COME_LATER, Ack, Round
from edgefl.wire.mqtt.neighbours import NeighbourMonitor, Neighbours, NeighbourSearch, named
from edgefl.wire.mqtt.topics import ALL_ROUNDS, Topics


class Say(Protocol):
    """Tells people of an event."""

    def __call__(self, event: str, text: str, **details: str | int | float) -> None: ...


class Surroundings:
    """Of one device; each thing is said once for as long as it stays true."""

    def __init__(self, federation: str, device: str, broker: Address, limits: Limits, say: Say) -> None:
        self._federation = federation
        self._device = device
        self._broker = broker
        self._limits = limits
        self._say = say
        looking = client_id(secrets.token_bytes(), "look", federation, device, style=broker.client_ids)
        search = NeighbourSearch(broker, looking, (ALL_ROUNDS,), limits)
        self._lookout = NeighbourMonitor(search, self, limits.notice_s)
        self._alone = False
        self._neighbours = ""
        self._answer = ""
        self._denied: set[tuple[str, str]] = set()
        self._over = ""
        self._left_out_since: float | None = None
        self._told_left_out: set[bool] = set()

    def step(self, *, alone: bool) -> None:
        """To be called now and then; ``alone``: the broker is there, and nothing was heard of the federation."""
        self._alone = alone
        self._lookout.step(alone=alone)

    def has_looked(self) -> bool:
        """Whether it has looked around since this was last asked, for which it opens a connection."""
        return self._lookout.has_looked()

    def offline(self, event: Disconnected) -> None:
        """The connection ended, or there is none."""
        again = f"trying again in {event.retry_s:.1f} s"
        if not event.rival:
            self._say("offline", f"{event.reason}; {again}")
            return
        self._say(
            "rival",
            f"another client takes the place of this one at {self._broker} again and again: most likely a second device of "
            f"federation {self._federation!r} runs as {self._device!r} too (`edgefl device --id`); give each "
            f"its own name and store; {again}",
        )

    def denied(self, event: Refusal) -> None:
        """The broker will not let this device read or write a topic; of blobs, which are many, the first is told."""
        kind = event.action, event.topic.rpartition("/blobs/")[0] or event.topic
        if kind not in self._denied:
            self._denied.add(kind)
            self._say("denied", event.text(self._broker), topic=event.topic, reason=event.reason)

    def answered(self, ack: Ack) -> None:
        """The server's word on the hello (no tier, or another than was asked for), or on a message that it cannot read."""
        if ack.text != self._answer:  # a server that was started again answers the same hello
            self._answer = ack.text
            about = "refused" if ack.reason in ("malformed", COME_LATER) else "tier"
            self._say(about, ack.text, reason=ack.reason)

    def announced(self, round: Round) -> None:
        """A round's announcement: that the training is over is said once for each run."""
        if round.state == "done" and round.run != self._over:
            self._over = round.run
            self._say("done", f"the training of federation {self._federation!r} is over", run=round.run)

    def left_out(self, without: Round | None, took_part: Callable[[], bool]) -> None:
        """Report once why this device has no task. Call it now and then.

        A server that does not hear a device cannot say so, and a broker drops in silence what its access rules forbid. A
        round that is announced beyond its deadline is the last word of a server that has stopped.

        Args:
            without: the open round in which this device has no task, None if there is none.
            took_part: returns True if this device had a task in this run, which needs no report.
        """
        if without is None:
            self._left_out_since = None
            return
        now = time.monotonic()
        self._left_out_since = self._left_out_since or now
        over = 0 < without.deadline < time.time()
        if over in self._told_left_out or now < self._left_out_since + self._limits.notice_s:
            return
        self._told_left_out.add(over)
        if not took_part():
            self._say(
                "left-out", self._overdue(without) if over else self._begun(without), round=without.round
            )

    def _overdue(self, round: Round) -> str:
        return (
            f"round {round.round} was announced until {clock(round.deadline)}, and the server has announced nothing since: "
            "it has stopped, or is starting again. This device waits for it"
        )

    def _begun(self, round: Round) -> str:
        user = f"user {self._broker.username!r}" if self._broker.username else "this device"
        below = Topics(self._federation).device(self._device).status.removesuffix("status")
        return (
            f"round {round.round} began without this device, which gets a task in a later round. If it gets none, the "
            f"server does not hear it: a broker with access rules has to let {user} write below {below}"
        )

    def put(self, neighbours: Neighbours) -> None:
        """Report the result of a search, on its thread."""
        others = [repr(name) for name in neighbours.served(but=self._federation)]
        text = f"nothing is heard of federation {self._federation!r} at {self._broker}"
        if others:
            text += f"; there is {named(others)}: name the right one (`edgefl device --federation`)"
        else:
            text += ", nor of another: this device waits for the server of its federation"
        if self._alone and text != self._neighbours:
            self._neighbours = text
            self._say("alone", text)

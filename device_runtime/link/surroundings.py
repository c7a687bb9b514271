"""What a device tells people of its place at the broker: who else is there, who takes its name, what tier it has not got."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.client_ids import client_id
from edgefl.wire.mqtt.messages import COME_LATER, Ack, Round
from edgefl.wire.mqtt.neighbours import Lookout, Neighbours, look, named
from edgefl.wire.mqtt.session import Address, Down, Refused
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
        self._lookout = Lookout(self._see, self._found, limits.notice_s)
        self._alone = False
        self._neighbours = ""
        self._answer = ""
        self._denied: set[tuple[str, str]] = set()
        self._over = ""
        self._left_out_since: float | None = None
        self._told_left_out = False

    def step(self, *, alone: bool) -> None:
        """To be called now and then; ``alone``: the broker is there, and nothing was heard of the federation."""
        self._alone = alone
        self._lookout.step(alone=alone)

    def has_looked(self) -> bool:
        """Whether it has looked around since this was last asked, for which it opens a connection."""
        return self._lookout.has_looked()

    def offline(self, event: Down) -> None:
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

    def denied(self, event: Refused) -> None:
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

    def left_out(self, number: int, took_part: Callable[[], bool]) -> None:
        """To be called now and then; ``number``: of the open round in which this device has no task, 0 if there is none.

        Said once: a server that does not hear a device cannot tell it so, and a broker drops in silence what its access
        rules forbid. Not to a device that had a task in this run.
        """
        if not number:
            self._left_out_since = None
            return
        now = time.monotonic()
        self._left_out_since = self._left_out_since or now
        if self._told_left_out or now < self._left_out_since + self._limits.notice_s:
            return
        self._told_left_out = True
        if not took_part():
            user = f"user {self._broker.username!r}" if self._broker.username else "this device"
            self._say(
                "left-out",
                f"round {number} is open without this device: the server gives it a task in a later round, or does not "
                f"hear it; a broker with access rules has to let {user} write below "
                f"{Topics(self._federation).device(self._device).status.removesuffix('status')}",
                round=number,
            )

    def _see(self) -> Neighbours:
        secret, style = secrets.token_bytes(), self._broker.client_ids
        looking = client_id(secret, "look", self._federation, self._device, style=style)
        return look(self._broker, looking, [ALL_ROUNDS], self._limits)

    def _found(self, neighbours: Neighbours) -> None:
        others = [repr(name) for name in neighbours.served(but=self._federation)]
        text = f"nothing is heard of federation {self._federation!r} at {self._broker}"
        if others:
            text += f"; there is {named(others)}: name the right one (`edgefl device --federation`)"
        else:
            text += ", nor of another: this device waits for the server of its federation"
        if self._alone and text != self._neighbours:
            self._neighbours = text
            self._say("alone", text)

"""Status of a device for its log: connection, access rights, tier, and reasons why no task arrives."""

from __future__ import annotations

import secrets
import time

from edgefl.system.clock import clock
from edgefl.wire.mqtt.address import client_id
from edgefl.wire.mqtt.events import Disconnected, Refusal
from edgefl.wire.mqtt.messages import COME_LATER, Ack, Round
from edgefl.wire.mqtt.neighbours import NeighbourMonitor, Neighbours, NeighbourSearch, list_devices
from edgefl.wire.mqtt.topics import ALL_ROUNDS, Topics
from edgefl_device.config import AgentConfig, DeviceLog


class StatusReporter:
    """Reporter of the status of one device: each fact once for as long as it is true.

    Args:
        config: Names of device and federation, broker and limits.
        log: Receives the reports.
    """

    def __init__(self, config: AgentConfig, log: DeviceLog) -> None:
        self._federation = config.federation
        self._device = config.device
        self._broker = config.broker
        self._limits = config.limits
        self._log = log
        style = config.broker.client_ids
        name = client_id(secrets.token_bytes(), "look", config.federation, config.device, style=style)
        search = NeighbourSearch(config.broker, name, (ALL_ROUNDS,), config.limits)
        self._search = NeighbourMonitor(search, self, config.limits.notice_s)
        self._alone = False
        self._neighbours = ""
        self._answer = ""
        self._denied: set[tuple[str, str]] = set()
        self._over = ""
        self._left_out_since: float | None = None
        self._reported_left_out: set[bool] = set()

    def step(self, *, alone: bool) -> None:
        """Search the broker for other federations from time to time while nothing of this one arrives.

        Call it periodically.

        Args:
            alone: True if the broker is connected, and nothing of this federation has arrived. Without that, no search
                is made.
        """
        self._alone = alone
        self._search.step(alone=alone)

    def has_looked(self) -> bool:
        """Return True if the broker was searched for other federations since the last call.

        A search opens a connection, which takes memory.
        """
        return self._search.has_looked()

    def report_offline(self, event: Disconnected) -> None:
        """Report that the connection ended or cannot be made, or that a second client uses this device's name."""
        again = f"trying again in {event.retry_s:.1f} s"
        if not event.rival:
            self._log.event("offline", f"{event.reason}; {again}")
            return
        self._log.event(
            "rival",
            f"another client takes the place of this one at {self._broker} again and again: most likely a second device of "
            f"federation {self._federation!r} runs as {self._device!r} too (`edgefl device --id`); give each "
            f"its own name and store; {again}",
        )

    def report_denied(self, event: Refusal) -> None:
        """Report that the broker denies this device a topic; of all blob topics only the first one."""
        kind = event.action, event.topic.rpartition("/blobs/")[0] or event.topic
        if kind not in self._denied:
            self._denied.add(kind)
            self._log.event("denied", event.text(self._broker), topic=event.topic, reason=event.reason)

    def report_answer(self, ack: Ack) -> None:
        """Report the server's answer to the hello (no tier, or another tier), or to a message that it could not read."""
        if ack.text != self._answer:  # a server that was started again answers the same hello
            self._answer = ack.text
            about = "refused" if ack.reason in ("malformed", COME_LATER) else "tier"
            self._log.event(about, ack.text, reason=ack.reason)

    def report_end(self, round: Round) -> None:
        """Report once for each run that the training is over."""
        if round.state == "done" and round.run != self._over:
            self._over = round.run
            self._log.event("done", f"the training of federation {self._federation!r} is over", run=round.run)

    def is_left_out(self, without: Round | None) -> bool:
        """Return True if it is time to report that this device has no task. Call it periodically.

        The report is needed because a server that does not receive from a device cannot answer it, and a broker
        silently drops what its access rules forbid. An open round after its deadline comes from a server that has
        stopped.

        Args:
            without: The open round in which this device has no task, None if there is none.
        """
        if without is None:
            self._left_out_since = None
            return False
        now = time.monotonic()
        self._left_out_since = self._left_out_since or now
        over = 0 < without.deadline < time.time()
        if over in self._reported_left_out or now < self._left_out_since + self._limits.notice_s:
            return False
        self._reported_left_out.add(over)
        return True

    def report_left_out(self, round: Round) -> None:
        """Report likely reasons why this device has no task in the open ``round``."""
        if 0 < round.deadline < time.time():
            text = (
                f"round {round.round} was announced until {clock(round.deadline)}, and the server has announced nothing "
                "since: it has stopped, or is starting again. This device waits for it"
            )
            self._log.event("left-out", text, round=round.round)
            return
        user = f"user {self._broker.username!r}" if self._broker.username else "this device"
        below = Topics(self._federation).device(self._device).status.removesuffix("status")
        text = (
            f"round {round.round} began without this device, which gets a task in a later round. If it gets none, the "
            f"server does not hear it: a broker with access rules has to let {user} write below {below}"
        )
        self._log.event("left-out", text, round=round.round)

    def put(self, neighbours: Neighbours) -> None:
        """Report the result of a search for federations. Called on the search's thread."""
        others = [repr(name) for name in neighbours.served(but=self._federation)]
        text = f"nothing is heard of federation {self._federation!r} at {self._broker}"
        if others:
            text += f"; there is {list_devices(others)}: name the right one (`edgefl device --federation`)"
        else:
            text += ", nor of another: this device waits for the server of its federation"
        if self._alone and text != self._neighbours:
            self._neighbours = text
            self._log.event("alone", text)

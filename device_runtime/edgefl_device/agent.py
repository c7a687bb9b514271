"""The device agent: connects, sends its hello, takes tasks, runs rounds, and keeps its store.

Threads: the session's network thread fills the inbox; the caller's thread reads it (:meth:`DeviceAgent.run`); one thread
runs the round and puts its outcome into the inbox; the outbox thread sends updates.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from edgefl.errors import IdentityError, ProtocolError, StoreError
from edgefl.wire.mqtt.address import client_id
from edgefl.wire.mqtt.events import Connected, Disconnected, IncomingMessage, Refusal, Will, check_limit
from edgefl.wire.mqtt.messages import Ack, Decline, Round, Status, Task
from edgefl.wire.mqtt.session import Session, make_inbox
from edgefl.wire.mqtt.topics import Topics
from edgefl_device.config import AgentConfig, DeviceLog
from edgefl_device.data import sources
from edgefl_device.engine.base import Engine
from edgefl_device.host import physical_memory, reserve_stack, return_memory_early, trim_memory
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import DuplicateMessageError, ServerTrust, SignedSession, load_signer
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.link.outbox import Outbox
from edgefl_device.link.presence import HelloSender, NoticeLimiter, RoundSubscription
from edgefl_device.link.status import StatusReporter
from edgefl_device.policy import OwnerRules, SystemQueries, day_of
from edgefl_device.profile.child import ProfilerProcess
from edgefl_device.profile.request import BundleProfiler, ProfileService
from edgefl_device.round.executor import RoundExecutor
from edgefl_device.round.scheduler import (
    AgentInbox,
    PageOutcome,
    ProgressMessages,
    RoundOutcome,
    RoundScheduler,
)
from edgefl_device.sandbox import process as sandbox
from edgefl_device.store.database import Store

_ROUND_END_S = 30.0
_ENGINE_IDLE_S = 5.0
"""Time for which an engine's process waits for another round: starting it takes a part of a second."""
_QUIET_S = 3.0
"""Time without a message after which memory is trimmed, which takes a part of a second and would slow each round."""
_COUNTED_BYTES = 1 << 20
"""Traffic is stored in steps of this: each step costs a write."""
_POLL_S = 0.25
"""Longest wait for an event: deadlines and silence cause none."""


def _profiler(config: AgentConfig, engine: Engine) -> ProfilerProcess:
    rights = sandbox.confinement(engine)
    return ProfilerProcess(engine=engine.format, threads=config.threads, confinement=rights)


class DeviceAgent:
    """Agent of one device: connects to the broker, takes tasks of the server, trains on local data and sends the
    updates.

    The constructor reads the data and opens the store; :meth:`run` does the rest.

    Args:
        config: Name, data and limits of the device.
        engine: Engine that runs the graphs.
        log: Receives the device's events, on any of its threads.
        profiler: Measures bundles on request; None measures in a process of its own.

    Raises:
        ConfigError: The data, the store or the key cannot be used.
        StoreError: The store belongs to another device, or is in use.
    """

    def __init__(
        self, config: AgentConfig, engine: Engine, log: DeviceLog, profiler: BundleProfiler | None = None
    ) -> None:
        self.config = config = replace(config, memory_bytes=config.memory_bytes or physical_memory())
        self.engine = engine
        self.log = log
        self.inbox: AgentInbox = make_inbox(config.limits)
        self._topics = topics = Topics(config.federation)
        self._mine = mine = topics.device(config.device)
        data = sources.load(config.data, config.bad_rows)
        self._samples, limits = len(data), config.limits

        # Storage and connection.
        self.store = store = _open_store(config)
        self._signer = load_signer(config.folder, store)
        self.session = self._open_session()
        self._signed = signed = SignedSession(self.session, self._signer)
        self._trust = trust = ServerTrust(store, config.server_keys, log)
        allowed, ca_file = config.policy.mirrors, config.broker.ca_file
        mirrors = Mirrors(limits, config.mirrors, allowed=allowed, ca_file=ca_file, log=log)
        self.fetcher = fetcher = Fetcher(self.session, topics, store, limits, mirrors)
        self.outbox = Outbox(signed, mine, store, limits, log)

        # Rounds and profiles.
        rules = OwnerRules(config.policy, SystemQueries(config.policy.commands), store)
        executor = RoundExecutor(config, engine, data, fetcher, store, trust, rules, log)
        progress = ProgressMessages(signed, mine, fetcher)
        self.rounds = RoundScheduler(executor, fetcher, self.outbox, progress, self.inbox)
        self.profiles = ProfileService(executor, signed, topics, profiler or _profiler(config, engine))

        # Presence in the federation.
        self.subscription = RoundSubscription(self.session, topics.current_round)
        self._hello = HelloSender(
            config, rules, engine, signed, key=self._signer.keys.public, samples=self._samples
        )
        self._status = StatusReporter(config, log)
        self.refusals = NoticeLimiter(limits.notice_s)
        self._upkeep = _Upkeep(self)
        self._stopping = threading.Event()
        self._online_number = 0

    def _open_session(self) -> Session:
        config = self.config
        secret, style = self._signer.keys.client_secret, config.broker.client_ids
        name = client_id(secret, "device", config.federation, config.device, style=style)
        return Session(config.broker, name, limits=config.limits, will=self, events=self.inbox)

    # -- the loop --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Connect and take part in rounds until the training is over (if the configuration sets ``until_done``) or
        :meth:`stop`.

        Blocks the calling thread, which handles all messages.

        Raises:
            BrokerError: The broker has a limit that a device's messages exceed.
        """
        return_memory_early()
        self._upkeep.trim()
        sandbox.rest(self.engine)
        for right in sandbox.missing(self.engine):
            self.log.event("sandbox", f"the engine's process is not confined by {right}")
        self.session.subscribe(
            [self._topics.current_round, self._mine.tasks, self._mine.acks, self.profiles.topic]
        )
        self._hello.begin()
        self.session.start()
        self.outbox.start()
        reserve_stack()
        trouble = ""
        try:
            while not self._stopping.is_set():
                try:
                    if self.config.until_done and self.rounds.is_done():
                        break
                    self._turn()
                    trouble = ""
                except StoreError as error:  # a full disk: the server sends again what was lost
                    if error.message != trouble:
                        trouble = error.message
                        self.log.event("store", error.message)
                    self._stopping.wait(self.config.limits.retry_pause_s)
        finally:
            self._shut_down()

    def stop(self) -> None:
        """Make :meth:`run` return soon. Safe to call from any thread and from a signal handler."""
        self._stopping.set()
        self.session.wake()

    def _turn(self) -> None:
        """Handle one event from the inbox, then run the periodic work that is due."""
        self._handle_next()
        if not self._stopping.is_set():  # a round that ended in this turn is not followed by another
            self.rounds.poll()
        connected = self.session.connected
        self._status.step(alone=connected and self.rounds.announced is None)
        if self._status.has_looked():
            self._upkeep.trim_later(0.0)
        without_us = self.rounds.round_without_us() if connected else None
        if self._status.is_left_out(without_us) and without_us is not None and not self.rounds.took_part():
            self._status.report_left_out(without_us)
        self._hello.step(connected=connected)
        self.profiles.step(busy=self.rounds.is_busy)
        self._upkeep.step()

    def _handle_next(self) -> None:
        try:
            event = self.inbox.get(timeout=_POLL_S)
        except queue.Empty:
            self._upkeep.trim_if_quiet()
            return
        self._upkeep.trim_later(_QUIET_S)
        check_limit(event, self.config.broker)
        match event:
            case RoundOutcome() | PageOutcome():
                self._upkeep.end_engine_later()
                self._send(self.rounds.finish())
            case Connected():
                self._greet()
            case Disconnected():
                self._status.report_offline(event)
            case Refusal():
                self._status.report_denied(event)
            case IncomingMessage():
                self.receive(event)

    def _shut_down(self) -> None:
        self._stopping.set()
        self.profiles.stop()
        ended = self.rounds.close(_ROUND_END_S)
        with suppress(StoreError):
            self._upkeep.count_traffic(least=1)
        self.outbox.stop()
        sandbox.rest(self.engine)
        if self.session.connected:
            self._signed.publish(self._mine.status, Status(online=False), retain=True).wait(2.0)
        self.session.stop()
        if ended:  # else the round's thread uses it
            self.store.close()

    # -- messages --------------------------------------------------------------------------------------------

    def current_will(self) -> Will:
        """Return the will (the broker's message after a lost connection) for a new connection: a signed offline status.

        Its message number lies between the first status of this connection and all later ones. The server therefore
        ignores the will of an earlier connection.
        """
        self._online_number = self._signer.numbers.next(2)
        offline = self._signer.seal(self._mine.status, Status(online=False), self._online_number + 1)
        return Will(self._mine.status, offline)

    def _greet(self) -> None:
        """On a new connection, publish status and hello, and request or send again all messages that the old one may
        have lost.
        """
        self.subscription.resume()
        online = self._signer.seal(self._mine.status, Status(online=True), self._online_number)
        self.session.publish(self._mine.status, online, retain=True)
        self._hello.send()
        self.fetcher.poke()
        self.profiles.poke()
        self.outbox.send_again()
        text = f"connected to {self.config.broker} as {self.config.device}"
        self.log.event("online", text, samples=self._samples)
        self._send(self.rounds.declines())
        self._upkeep.trim()  # a round may come at once, and begins like that of a device that waited

    def receive(self, message: IncomingMessage) -> None:
        """Handle a message of the broker. Report and ignore it if it is malformed or not signed by the server."""
        topic = message.topic
        try:
            self._dispatch(topic, message.payload)
        except DuplicateMessageError:
            return
        except ProtocolError as error:
            reason = error.reason if isinstance(error, IdentityError) else "malformed"
            if self.refusals.is_due((topic, reason)):
                self.log.event("refused", f"ignored a message on {topic}: {error.message}")

    def _dispatch(self, topic: str, payload: bytes) -> None:
        """Pass a message to its handler by topic. Raise ProtocolError if it is malformed, unsigned, or a copy
        (DuplicateMessageError).
        """
        if topic.startswith(f"{self._topics.root}/blobs/"):
            self.fetcher.deliver(topic, payload)
        elif self.profiles.owns(topic):
            self.profiles.deliver(topic, payload)
        elif not payload:
            return
        elif topic == self.profiles.topic:
            self.profiles.handle_request(payload)
        elif topic == self._topics.current_round:
            announced = self._trust.open(Round, topic, payload)
            self._status.report_end(announced)
            self.fetcher.mirrors.use_announced(announced)
            self._send(self.rounds.announce(announced))
            if self.subscription.is_due_to_pause(announced) and self.rounds.is_idle():
                self.subscription.pause()
        elif topic == self._mine.tasks:
            self._send(self.rounds.assign(self._trust.open(Task, topic, payload)))
            self.subscription.resume()
        elif topic == self._mine.acks:
            ack = self._trust.open(Ack, topic, payload)
            if ack.nonce:
                self.outbox.deliver(ack)
            else:
                self._status.report_answer(ack)
                self._hello.handle_answer(ack)

    def _send(self, declines: Iterable[Decline]) -> None:
        for decline in declines:
            self._signed.publish(self._mine.declines, decline)


class _Upkeep:
    """Periodic work of the agent's loop: trims memory, ends the idle engine, counts traffic, and reports dropped
    messages.
    """

    def __init__(self, agent: DeviceAgent) -> None:
        self._agent = agent
        self._trim_at = self._engine_ends_at = math.inf
        self._reported_drops = (0, 0)
        self._report_drops_at = 0.0
        self._counted_bytes = 0

    def trim(self) -> None:
        """Return freed memory to the system, such as that of the start or of the last round."""
        self._trim_at = math.inf
        trim_memory()

    def trim_later(self, after_s: float) -> None:
        """Set the time of the next trim to ``after_s`` seconds from now, and forget an earlier one; see
        :meth:`trim_if_quiet`.
        """
        self._trim_at = time.monotonic() + after_s

    def trim_if_quiet(self) -> None:
        """Trim memory if the time set by :meth:`trim_later` has passed and no round runs."""
        if self._trim_at <= time.monotonic() and not self._agent.rounds.is_busy:
            self.trim()

    def end_engine_later(self) -> None:
        """Schedule the end of the engine's process, which an idle device does not need. :meth:`step` ends it after five
        seconds, unless a round runs.
        """
        self._engine_ends_at = time.monotonic() + _ENGINE_IDLE_S

    def step(self) -> None:
        """Do the periodic work that is due now."""
        if not self._agent.rounds.is_busy and time.monotonic() > self._engine_ends_at:
            sandbox.rest(self._agent.engine)
            self._engine_ends_at = math.inf
        self.count_traffic(least=_COUNTED_BYTES)
        self._report_drops()

    def count_traffic(self, least: int) -> None:
        """Add the bytes sent and received since the last count to today's traffic in the store. Does nothing if the
        owner's policy has no daily limit.

        Args:
            least: Smallest number of new bytes that is stored; fewer are added by a later call.
        """
        agent = self._agent
        mirrored = agent.fetcher.mirrors.received_bytes
        total = agent.session.received_bytes + agent.session.sent_bytes + mirrored
        if agent.config.policy.most_bytes and total - self._counted_bytes >= max(1, least):
            agent.store.add_traffic(day_of(time.localtime()), total - self._counted_bytes)
            self._counted_bytes = total

    def _report_drops(self) -> None:
        """Report, at most once in ``notice_s``, how many messages were dropped or refused without a report of their own."""
        agent, now = self._agent, time.monotonic()
        drops = (agent.inbox.dropped + agent.fetcher.dropped, agent.refusals.suppressed)
        if drops == self._reported_drops or now < self._report_drops_at:
            return
        self._reported_drops, self._report_drops_at = drops, now + agent.config.limits.notice_s
        texts = (
            "were dropped unread: more came than this device reads",
            "were refused like others that were reported",
        )
        parts = [f"{count} messages so far {text}" for count, text in zip(drops, texts, strict=True) if count]
        agent.log.event("limited", "; ".join(parts), dropped=drops[0], refused=drops[1])


def _open_store(config: AgentConfig) -> Store:
    return Store(
        config.folder,
        limit_bytes=config.limits.store_bytes,
        history_rounds=config.limits.history_rounds,
        federation=config.federation,
        device=config.device,
    )

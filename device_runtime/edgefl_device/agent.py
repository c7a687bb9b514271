"""The device agent: connects, says what it is, takes tasks, runs rounds, keeps its store.

Threads: the session's network thread fills the inbox; the caller's thread reads it (:meth:`Agent.run`);
one worker thread runs the round; the outbox thread sends updates.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from edgefl.errors import IdentityError, ProtocolError, StoreError
from edgefl.wire.mqtt.address import client_id
from edgefl.wire.mqtt.connection import Delivery
from edgefl.wire.mqtt.events import Connected, Disconnected, IncomingMessage, Refusal, Will, check_limit
from edgefl.wire.mqtt.messages import Ack, Message, Round, Status, Task
from edgefl.wire.mqtt.session import Session
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.text import printable
from edgefl_device import conditions
from edgefl_device.config import AgentConfig, AgentEvent
from edgefl_device.data import sources
from edgefl_device.engine.base import Engine
from edgefl_device.host import physical_memory
from edgefl_device.libraries import release_code
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.greeting import Greeting
from edgefl_device.link.identity import Repeated, ServerTrust, speaker_of
from edgefl_device.link.listening import Listening
from edgefl_device.link.mirrors import Mirrors
from edgefl_device.link.notices import Notices
from edgefl_device.link.outbox import Outbox, past_of
from edgefl_device.link.surroundings import Surroundings
from edgefl_device.memory import reserve_stack, return_memory_early, trim_memory
from edgefl_device.policy import Rules, asked_of_system, day_of
from edgefl_device.profile.child import Child
from edgefl_device.profile.request import Measure, ProfileDesk
from edgefl_device.round.desk import RoundDesk
from edgefl_device.round.job import Job
from edgefl_device.round.pages import whole_of
from edgefl_device.round.progress import ProgressMessages
from edgefl_device.round.work import Work
from edgefl_device.sandbox import engine as sandbox
from edgefl_device.store.carry_choice import StoredCarry
from edgefl_device.store.database import Outgoing, Store

_WORKER_END_S = 30.0
_ENGINE_KEPT_S = 5.0
"""How long the process of an engine waits for another round: starting it takes a part of a second."""
_QUIET_S = 3.0
"""Without a message for so long a device waits: it gives memory back then, which takes a part of a second of each round."""
_COUNTED_BYTES = 1 << 20
"""Traffic is written down in steps of that: each costs a write."""
_MOST_TEXT = 2000
_LOOK_S = 0.25  # deadlines and silence wake nobody


class Agent:
    """One device. ``run`` returns when the training is done (if asked to) or ``stop`` was called."""

    def __init__(
        self,
        config: AgentConfig,
        engine: Engine,
        report: Callable[[AgentEvent], None],
        measure: Measure | None = None,
    ) -> None:
        self._stopping = threading.Event()
        self._config = config
        self._engine = engine
        self._report = report
        limits = config.limits
        topics = Topics(config.federation)
        self._topics = topics
        self._mine = topics.device(config.device)
        self._data = sources.load(config.data, config.bad_rows)
        self._memory_bytes = config.memory_bytes or physical_memory()
        self._store = Store(
            config.folder,
            limit_bytes=limits.store_bytes,
            history_rounds=limits.history_rounds,
            federation=config.federation,
            device=config.device,
        )
        self._speaker = speaker_of(config.folder, self._store)
        self._session = Session(
            config.broker,
            client_id(
                self._speaker.keys.client_secret,
                "device",
                config.federation,
                config.device,
                style=config.broker.client_ids,
            ),
            limits=limits,
            will=self._last_will,
        )
        self._trust = ServerTrust(self._store, config.server_keys, self._say)
        self._online_at = 0
        self._quiet_at = math.inf
        mirrors = Mirrors(
            limits,
            config.mirrors,
            allowed=config.policy.mirrors,
            ca_file=config.broker.ca_file,
            tell=lambda text: self._say("mirror", text),
        )
        self._fetcher = Fetcher(self._session, topics, self._store, limits, self._round_is_over, mirrors)
        self._outbox = Outbox(
            self._session,
            self._mine,
            self._store,
            limits,
            self._settled,
            lambda text: self._say("store", text),
            self._speaker.seal,
        )
        self._progress = ProgressMessages(self._session, self._mine, self._fetcher, self._speaker.seal)
        self._rounds = RoundDesk(
            self._session,
            self._store,
            self._outbox,
            self._progress,
            format=engine.format,
            retry_pause_s=limits.retry_pause_s,
            stopping=self._stopping,
            work=self._do,
            read=lambda announced: whole_of(announced, self._fetcher, limits),
            send=lambda decline: self._publish(self._mine.declines, decline),
            say=self._say,
            dropped=self._dropped,
        )
        self._listening = Listening(self._session, topics.current_round, self._rounds.is_idle)
        rules = Rules(config.policy, asked_of_system(config.policy.commands), self._store.traffic)
        self._greeting = Greeting(
            config,
            conditions.Watch(conditions.Look(rules), limits.conditions_s, self._session.wake),
            lambda hello: self._publish(self._mine.hello, hello, retain=True),
            memory_bytes=self._memory_bytes,
            samples=len(self._data),
            engine=(engine.name, engine.version),
            key=self._speaker.keys.public,
            topic=self._mine.hello,
        )
        self._work = Work(
            device=config.device,
            folder=config.folder,
            limits=limits,
            trust=self._trust,
            memory_bytes=self._memory_bytes,
            threads=config.threads,
            tune=config.tune,
            engine=engine,
            data=self._data,
            fetcher=self._fetcher,
            store=self._store,
            begins=self._begins,
            watch=self._progress.watch,
            aborted=self._rounds.is_over,
            dropped=self._dropped,
            rules=rules,
        )
        bounds = sandbox.confinement(engine)
        child = Child(engine=engine.format, threads=config.threads, confinement=bounds)
        measure = measure or child.measure
        self._profiles = ProfileDesk(
            self._work, self._session, topics, measure, self._say, self._speaker.seal
        )
        self._surroundings = Surroundings(config.federation, config.device, config.broker, limits, self._say)
        self._rest_at = math.inf
        self._has_worked = False
        self._refusals = Notices(limits.notice_s)
        self._limited_told = (0, 0)
        self._tell_dropped_at = 0.0
        self._counted_bytes = 0
        self._trouble = ""

    # -- the inbox -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until done or stopped. BrokerError if the broker does not take what a device has to send."""
        return_memory_early()
        self._rest()
        sandbox.rest(self._engine)
        for what in sandbox.missing(self._engine):
            self._say("sandbox", f"the engine's process is not confined by {what}")
        self._session.subscribe(
            [self._topics.current_round, self._mine.tasks, self._mine.acks, self._profiles.topic]
        )
        self._greeting.begin()
        self._session.start()
        self._outbox.start()
        reserve_stack()
        try:
            while not self._stopping.is_set():
                try:
                    if self._config.until_done and self._rounds.is_done():
                        break
                    self._turn()
                except StoreError as error:  # a full disk: what it was for comes again
                    self._store_trouble(error)
        finally:
            self._shut_down()

    def _turn(self) -> None:
        self._handle_next()
        if self._rounds.collect():
            self._quiet_at = time.monotonic() + _QUIET_S
            self._rest_at = time.monotonic() + _ENGINE_KEPT_S
        self._rounds.begin()
        connected = self._session.connected
        self._surroundings.step(alone=connected and self._rounds.announced is None)
        if self._surroundings.has_looked():
            self._quiet_at = time.monotonic()
        self._surroundings.left_out(
            self._rounds.round_without_us() if connected else None, self._rounds.took_part
        )
        self._greeting.step(connected=connected)
        self._profiles.step(busy=self._rounds.busy)
        self._count_traffic(least=_COUNTED_BYTES)
        if not self._rounds.busy and time.monotonic() > self._rest_at:
            sandbox.rest(self._engine)
            self._rest_at = math.inf
        self._tell_dropped()
        self._trouble = ""

    def _tell_dropped(self) -> None:
        """How many messages were dropped unread, or refused without a word, since the start: now and then."""
        dropped, hushed = self._session.inbox.dropped + self._fetcher.dropped, self._refusals.hushed
        now = time.monotonic()
        if (dropped, hushed) == self._limited_told or now < self._tell_dropped_at:
            return
        self._limited_told, self._tell_dropped_at = (dropped, hushed), now + self._config.limits.notice_s
        told = {
            "were dropped unread: more came than this device reads": dropped,
            "were refused like others that were told": hushed,
        }
        parts = [f"{count} messages so far {what}" for what, count in told.items() if count]
        self._say("limited", "; ".join(parts), dropped=dropped, refused=hushed)

    def _store_trouble(self, error: StoreError) -> None:
        """Said once for as long as it stays so."""
        if error.message != self._trouble:
            self._trouble = error.message
            self._say("store", error.message)
        self._stopping.wait(self._config.limits.retry_pause_s)

    def _count_traffic(self, least: int) -> None:
        """Keep what went over the link, once it is so many bytes more, where the owner's policy asks for it."""
        mirrored = self._fetcher.mirrors.received_bytes
        total = self._session.received_bytes + self._session.sent_bytes + mirrored
        if self._config.policy.most_bytes and total - self._counted_bytes >= max(1, least):
            self._store.add_traffic(day_of(time.localtime()), total - self._counted_bytes)
            self._counted_bytes = total

    def stop(self) -> None:
        self._stopping.set()
        self._session.wake()

    def _shut_down(self) -> None:
        self._stopping.set()
        self._fetcher.poke()
        self._profiles.stop()
        ended = self._rounds.join(_WORKER_END_S)
        with suppress(StoreError):
            self._count_traffic(least=1)
        self._outbox.stop()
        sandbox.rest(self._engine)
        if self._session.connected:
            self._publish(self._mine.status, Status(online=False), retain=True).wait(2.0)
        self._session.stop()
        if ended:  # else its worker uses it
            self._store.close()

    def _handle_next(self) -> None:
        try:
            event = self._session.inbox.get(timeout=_LOOK_S)
        except queue.Empty:
            if self._quiet_at <= time.monotonic() and not self._rounds.busy:
                self._rest()  # of what checking and making signatures took
            return
        self._quiet_at = time.monotonic() + _QUIET_S
        check_limit(event, self._config.broker)
        if isinstance(event, Connected):
            self._greet()
        elif isinstance(event, Disconnected):
            self._surroundings.offline(event)
        elif isinstance(event, Refusal):
            self._surroundings.denied(event)
        elif isinstance(event, IncomingMessage):
            self._route(event)

    def _last_will(self) -> Will:
        """Of the connection that is made now. Its number is after the one of what this device says first, and before all
        else that it says: a will of an earlier connection is old news."""
        self._online_at = self._speaker.numbers.next(2)
        offline = self._speaker.seal(self._mine.status, Status(online=False), self._online_at + 1)
        return Will(self._mine.status, offline)

    def _publish(self, topic: str, message: Message, *, retain: bool = False) -> Delivery:
        return self._session.publish(topic, self._speaker.seal(topic, message), retain=retain)

    def _greet(self) -> None:
        self._listening.begin()
        online = self._speaker.seal(self._mine.status, Status(online=True), self._online_at)
        self._session.publish(self._mine.status, online, retain=True)
        self._greeting.say()
        self._fetcher.poke()
        self._profiles.poke()
        self._outbox.send_again()
        self._say(
            "online", f"connected to {self._config.broker} as {self._config.device}", samples=len(self._data)
        )
        self._rounds.declare()
        if not self._has_worked:
            self._rest()  # its first round may come at once, and begins like that of a device that waited

    def _rest(self) -> None:
        """Give back what the start or a round took and waiting does not need. The engine's code that its import used stays
        for the first round."""
        self._quiet_at = math.inf
        trim_memory()
        release_code(keep="" if self._has_worked else f"/{self._engine.name}/")

    def _route(self, message: IncomingMessage) -> None:
        topic = message.topic
        try:
            self._take(topic, message.payload)
        except Repeated:
            return
        except ProtocolError as error:
            reason = error.reason if isinstance(error, IdentityError) else "malformed"
            if self._refusals.due((topic, reason)):
                self._say("refused", f"ignored a message on {topic}: {error.message}")

    def _take(self, topic: str, payload: bytes) -> None:
        """What it says is done. ProtocolError if it is malformed, not the server's, or a copy (Repeated)."""
        if topic.startswith(f"{self._topics.root}/blobs/"):
            self._fetcher.deliver(topic, payload)
        elif self._profiles.owns(topic):
            self._profiles.deliver(topic, payload)
        elif not payload:
            return
        elif topic == self._profiles.topic:
            self._profiles.take(payload)
        elif topic == self._topics.current_round:
            announced = self._trust.open(Round, topic, payload)
            self._surroundings.announced(announced)
            self._fetcher.mirrors.announced(announced)
            self._rounds.announce(announced)
            self._listening.heard(announced)
        elif topic == self._mine.tasks:
            self._rounds.assign(self._trust.open(Task, topic, payload))
            self._listening.begin()
        elif topic == self._mine.acks:
            ack = self._trust.open(Ack, topic, payload)
            if ack.nonce:
                self._outbox.deliver(ack)
            else:
                self._surroundings.answered(ack)
                self._greeting.answered(ack)

    # -- of rounds -------------------------------------------------------------------------------------------

    def _do(self, job: Job) -> None:
        if exceeded := self._work.run(job):
            self._say("memory", exceeded)

    def _round_is_over(self) -> bool:
        return self._rounds.is_over()

    def _begins(self, job: Job, rows: int, steps: int, left_out: str) -> None:
        self._has_worked = True
        text = f"round {job.round} as {job.tier}: {rows} samples, {steps} steps"
        self._say("round", f"{text}; {left_out}" if left_out else text, round=job.round)

    def _settled(self, outgoing: Outgoing, ack: Ack) -> None:
        """The outbox thread: the server accepted or refused an update."""
        past = past_of(outgoing, ack)
        self._store.settle(past)
        text = f"round {past.round}: {ack.status} {ack.text}".rstrip()
        self._say(ack.status, text, round=past.round, loss=past.loss)
        self._session.wake()

    def _dropped(self, text: str, carry: StoredCarry) -> None:
        self._say("carry", text, run=carry.name.partition("/")[0], round=carry.round)

    def _say(self, event: str, text: str, **details: str | int | float) -> None:
        """Tell people. Nobody has to listen: a closed standard output must not stop a thread of the device."""
        with suppress(Exception):
            clean = {name: printable(v) if isinstance(v, str) else v for name, v in details.items()}
            self._report(AgentEvent(event=event, text=printable(text, _MOST_TEXT), details=clean))

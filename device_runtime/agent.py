"""The device agent: connects, says what it is, takes tasks, runs rounds, keeps its store.

Threads: the session's network thread fills the inbox; the caller's thread reads it (:meth:`Agent.run`);
one worker thread runs the round; the outbox thread sends updates.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from device_runtime.config import AgentConfig, AgentEvent
from device_runtime.data import sources
from device_runtime.engine.base import Engine
from device_runtime.host import agent_version, physical_memory
from device_runtime.link.fetch import Fetcher
from device_runtime.link.identity import Repeated, ServerTrust, speaker_of
from device_runtime.link.notices import Notices
from device_runtime.link.outbox import Outbox, past_of
from device_runtime.link.surroundings import Surroundings
from device_runtime.memory import release_code, return_memory_early, trim_memory
from device_runtime.policy import Rules, asked_of_system, day_of
from device_runtime.profile.child import Child
from device_runtime.profile.request import Measure, ProfileDesk
from device_runtime.round.job import Job, decode_job, encode_job
from device_runtime.round.progress import ProgressMessages
from device_runtime.round.resume import drop_abandoned
from device_runtime.round.work import Work
from device_runtime.sandbox import engine as sandbox
from device_runtime.store.carry_rows import StoredCarry
from device_runtime.store.database import DECLINED, Outgoing, PastRound, Store
from edgefl.wire.enrolment import proof
from edgefl.wire.errors import (
    DataError,
    EdgeflError,
    IdentityError,
    ProtocolError,
    RoundAborted,
    RoundDeclined,
    StoreError,
)
from edgefl.wire.mqtt.client_ids import client_id
from edgefl.wire.mqtt.messages import WRONG_DATA, Ack, Decline, Hello, Message, Round, Status, Task
from edgefl.wire.mqtt.session import Delivery, Down, Incoming, Refused, Session, Up, Will
from edgefl.wire.mqtt.topics import Topics
from edgefl.wire.printable import printable

_WORKER_END_S = 30.0
_MOST_RUNS = 16
"""Runs that are remembered as open: a federation has one after the other."""
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
        self._config = config
        self._engine = engine
        self._report = report
        limits = config.limits
        topics = Topics(config.federation)
        self._topics = topics
        self._mine = topics.device(config.device)
        self._data = sources.load(config.data, config.bad_rows)
        self._memory_bytes = config.memory_bytes or physical_memory()
        self._session = Session(
            config.broker,
            client_id("device", config.federation, config.device, style=config.broker.client_ids),
            limits=limits,
            will=self._last_will,
        )
        self._store = Store(
            config.folder,
            limit_bytes=limits.store_bytes,
            history_rounds=limits.history_rounds,
            federation=config.federation,
            device=config.device,
        )
        self._speaker = speaker_of(config.folder, self._store)
        self._trust = ServerTrust(self._store, config.server_keys, self._say)
        self._online_at = 0
        self._quiet_at = math.inf
        self._fetcher = Fetcher(self._session, topics, self._store, limits, self._round_is_over)
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
            aborted=self._round_is_over,
            dropped=self._dropped,
            rules=Rules(config.policy, asked_of_system(config.policy.commands), self._store.traffic),
        )
        bounds = sandbox.confinement(engine)
        child = Child(engine=engine.format, threads=config.threads, confinement=bounds)
        measure = measure or child.measure
        self._profiles = ProfileDesk(
            self._work, self._session, topics, measure, self._say, self._speaker.seal
        )
        self._surroundings = Surroundings(config.federation, config.device, config.broker, limits, self._say)
        self._announced: Round | None = None
        self._task: Task | None = None
        self._job: Job | None = None
        self._seen_open: deque[str] = deque(maxlen=_MOST_RUNS)
        self._failed: dict[str, float] = {}
        self._told_failure = ("", "")
        self._worker: threading.Thread | None = None
        self._idle = threading.Event()
        self._begun: set[str] = set()
        self._rest_at = math.inf
        self._refusals = Notices(limits.notice_s)
        self._limited_told = (0, 0)
        self._tell_dropped_at = 0.0
        self._counted_bytes = 0
        self._trouble = ""
        self._stopping = threading.Event()

    # -- the inbox -------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until done or stopped."""
        return_memory_early()
        self._rest()
        sandbox.rest(self._engine)
        for what in sandbox.missing(self._engine):
            self._say("sandbox", f"the engine's process is not confined by {what}")
        self._session.subscribe(
            [self._topics.current_round, self._mine.tasks, self._mine.acks, self._profiles.topic]
        )
        self._session.start()
        self._outbox.start()
        try:
            while not self._stopping.is_set():
                try:
                    if self._is_done():
                        break
                    self._turn()
                except StoreError as error:  # a full disk: what it was for comes again
                    self._store_trouble(error)
        finally:
            self._shut_down()

    def _turn(self) -> None:
        self._handle_next()
        self._advance()
        self._surroundings.step(alone=self._session.connected and self._announced is None)
        self._surroundings.left_out(self._round_without_us(), self._took_part)
        self._profiles.step(busy=self._worker is not None)
        self._count_traffic(least=_COUNTED_BYTES)
        if self._worker is None and time.monotonic() > self._rest_at:
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
        total = self._session.received_bytes + self._session.sent_bytes
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
        if self._worker is not None:
            self._worker.join(timeout=_WORKER_END_S)
        with suppress(StoreError):
            self._count_traffic(least=1)
        self._outbox.stop()
        sandbox.rest(self._engine)
        if self._session.connected:
            self._publish(self._mine.status, Status(online=False), retain=True).wait(2.0)
        self._session.stop()
        if (
            self._worker is None or not self._worker.is_alive()
        ):  # else it ends with the process, in a long step
            self._store.close()

    def _handle_next(self) -> None:
        try:
            event = self._session.inbox.get(timeout=_LOOK_S)
        except queue.Empty:
            if self._quiet_at <= time.monotonic() and self._worker is None:
                self._rest()  # of what checking and making signatures took
            return
        self._quiet_at = time.monotonic() + _QUIET_S
        if isinstance(event, Up):
            self._greet()
        elif isinstance(event, Down):
            self._surroundings.offline(event)
        elif isinstance(event, Refused):
            self._surroundings.denied(event)
        elif isinstance(event, Incoming):
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
        online = self._speaker.seal(self._mine.status, Status(online=True), self._online_at)
        self._session.publish(self._mine.status, online, retain=True)
        token = self._config.token
        hello = Hello(
            agent=agent_version(),
            memory_bytes=self._memory_bytes,
            cores=os.cpu_count() or 1,
            samples=len(self._data),
            engines={self._engine.name: self._engine.version},
            tier=self._config.tier,
            token=token.name if token else "",
            proof=proof(token.secret, self._mine.hello, self._speaker.keys.public) if token else b"",
        )
        # Retained: a server that starts after its devices must still learn of them.
        self._publish(self._mine.hello, hello, retain=True)
        self._fetcher.poke()
        self._profiles.poke()
        self._outbox.send_again()
        self._say(
            "online", f"connected to {self._config.broker} as {self._config.device}", samples=len(self._data)
        )
        self._declare()

    def _rest(self) -> None:
        """Give back what the start or a round took and waiting does not need. The engine's own code stays for the next
        round."""
        self._quiet_at = math.inf
        trim_memory()
        release_code(keep=f"/{self._engine.name}/")

    def _route(self, message: Incoming) -> None:
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
            self._announced = self._trust.open(Round, topic, payload)
            if self._announced.state == "open" and self._announced.run not in self._seen_open:
                self._seen_open.append(self._announced.run)
            self._surroundings.announced(self._announced)
            self._drop_abandoned()
            self._remind()
        elif topic == self._mine.tasks:
            self._task = self._trust.open(Task, topic, payload)
            self._remind()
        elif topic == self._mine.acks:
            ack = self._trust.open(Ack, topic, payload)
            if ack.nonce:
                self._outbox.deliver(ack)
            else:
                self._surroundings.answered(ack)

    def _remind(self) -> None:
        """The server speaks of a round: it may have lost what we sent, so updates that wait and what we declined of this
        round are sent again."""
        if self._store.outgoing() is not None:
            self._outbox.send_again()
        self._declare()

    def _declare(self) -> None:
        """Say again what was declined of the open round: there is no acknowledgement of it."""
        announced = self._announced
        if announced is not None and announced.state == "open":
            for past in self._store.declined(announced.run, announced.round):
                self._send_decline(past)

    # -- rounds ----------------------------------------------------------------------------------------------

    def _round_is_over(self) -> bool:
        """Whether the job in hand is of no use any more."""
        job, announced = self._job, self._announced
        if self._stopping.is_set():
            return True
        if job is None or announced is None:
            return False
        return not job.is_open(announced)

    def _round_without_us(self) -> int:
        """The number of the round that is open, where this process was given no task so far; else 0."""
        announced = self._announced
        idle = self._task is None and self._worker is None and self._session.connected
        return announced.round if idle and announced is not None and announced.state == "open" else 0

    def _took_part(self) -> bool:
        """Whether this device had a task in the run, in a process before this one."""
        run = self._announced.run if self._announced is not None else ""
        return any(past.run == run for past in self._store.history())

    def _is_done(self) -> bool:
        announced = self._announced
        if not self._config.until_done or announced is None or announced.state != "done":
            return False
        # A retained "done" of an earlier run must not send a device away before the next run begins.
        ours = announced.run in self._seen_open or any(p.run == announced.run for p in self._store.history())
        return ours and self._store.outgoing() is None and self._worker is None

    def _advance(self) -> None:
        """Start the round that is open and ours, unless it is done, failed a moment ago, or already running."""
        if self._worker is not None:
            if not self._idle.is_set():
                return
            self._worker.join()
            self._worker = None
            self._job = None
            self._drop_abandoned()  # its last step may have been made after its round was over
            self._rest()
            self._rest_at = time.monotonic() + _ENGINE_KEPT_S
        job = self._next_job()
        if job is None or time.monotonic() < self._failed.get(job.nonce, 0.0):
            return
        self._job = job
        self._idle.clear()
        self._worker = threading.Thread(
            target=self._attempt, args=(job,), name=f"round-{job.round}", daemon=True
        )
        self._worker.start()

    def _next_job(self) -> Job | None:
        if self._announced is None:
            return None
        kept_job = self._kept_job()
        if kept_job is not None:
            return kept_job
        form = self._engine.format
        job = Job.of(self._task, self._announced, form) if self._task is not None else None
        # In this order: the outbox thread may move an update from waiting to past between the two questions.
        if job is None or self._store.waits(job.nonce) or self._store.past(job.nonce) is not None:
            return None
        return self._tried(job, job)

    def _kept_job(self) -> Job | None:
        """The job of a killed process or a failed attempt, as its round is announced now; dropped if that is over.

        A server that was started again may announce the same round with other chunks, another bundle or another key.
        """
        data = self._store.job()
        if data is None or self._announced is None:
            return None
        job = decode_job(data)
        now = job.following(self._announced, self._engine.format) if job is not None else None
        if job is None or now is None:
            self._store.close_job()
            return None
        return self._tried(now, job, fresh=now.content != job.content)

    def _tried(self, job: Job, kept: Job, *, fresh: bool = False) -> Job:
        """The job as it is kept from now on. The first attempt of each process counts: one that ends the process is not made
        for ever."""
        if job.nonce not in self._begun:
            self._begun = {job.nonce}
            job = msgspec.structs.replace(job, tries=job.tries + 1)
        if job != kept:
            self._store.open_job(encode_job(job), fresh=fresh)
        return job

    def _attempt(self, job: Job) -> None:
        """The worker thread: one round, from the first blob to the outbox."""
        try:
            self._perform(job)
        except RoundAborted as error:
            if self._stopping.is_set():
                with suppress(StoreError):  # it ended in good order
                    self._store.open_job(encode_job(msgspec.structs.replace(job, tries=job.tries - 1)))
                text = f"round {job.round} is left as it is: this device goes on with it when it is started again"
                self._say("stopped", text, round=job.round)
            else:
                self._say("aborted", error.message, round=job.round)
        except EdgeflError as error:
            self._fail(job, error.message)
        except Exception as error:  # an engine's own exception must not end the agent
            self._fail(job, f"{type(error).__name__}: {error}")
        finally:
            self._idle.set()
            self._session.wake()

    def _perform(self, job: Job) -> None:
        try:
            self._work.run(job)
            self._outbox.wake()
        except RoundDeclined as declined:
            self._decline(job, declined)
        except DataError as error:  # another round, or another bundle, may fit
            self._say("data", error.message, round=job.round)
            self._decline(job, RoundDeclined(WRONG_DATA, str(error.details.get("told", error.message))))

    def _decline(self, job: Job, declined: RoundDeclined) -> None:
        """Remembered before it is sent: it is sent again until its round is over, and never worked on again."""
        past = PastRound(
            run=job.run,
            round=job.round,
            tier=job.tier,
            nonce=job.nonce,
            outcome=DECLINED,
            reason=declined.reason,
            text=declined.message,
        )
        self._store.decline(past)
        self._send_decline(past)
        self._say("declined", f"round {job.round} ({declined.reason}): {declined.message}", round=job.round)

    def _send_decline(self, past: PastRound) -> None:
        decline = Decline(round=past.round, nonce=past.nonce, reason=past.reason, text=past.text)
        self._publish(self._mine.declines, decline)

    def _drop_abandoned(self) -> None:
        with suppress(StoreError):  # a full disk: the next announcement finds it again
            if self._announced is not None:
                drop_abandoned(self._store, self._announced, self._dropped)

    def _fail(self, job: Job, reason: str) -> None:
        self._failed[job.nonce] = time.monotonic() + self._config.limits.retry_pause_s
        self._progress.failed(job, reason)
        if (job.nonce, reason) == self._told_failure:  # it tries every second, and people have read it
            return
        self._told_failure = job.nonce, reason
        self._say(
            "failed", f"round {job.round} failed: {reason}; trying again while it is open", round=job.round
        )

    def _begins(self, job: Job, rows: int, steps: int, left_out: str) -> None:
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

    # -- telling people --------------------------------------------------------------------------------------

    def _say(self, event: str, text: str, **details: str | int | float) -> None:
        """Tell people. Nobody has to listen: a closed standard output must not stop a thread of the device."""
        with suppress(Exception):
            clean = {name: printable(v) if isinstance(v, str) else v for name, v in details.items()}
            self._report(AgentEvent(event=event, text=printable(text, _MOST_TEXT), details=clean))

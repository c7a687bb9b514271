"""Where a device's rounds are taken in: which one is to be worked on, the thread that does it, and what becomes of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass

import msgspec

from edgefl.errors import DataError, EdgeflError, RoundAborted, RoundDeclined, StoreError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import WRONG_DATA, Decline, Round, Task
from edgefl.wire.mqtt.session import Session
from edgefl_device.link.outbox import Outbox
from edgefl_device.round.job import Job, decode_job, encode_job
from edgefl_device.round.progress import ProgressMessages
from edgefl_device.round.resume import Tell, drop_abandoned
from edgefl_device.store.database import DECLINED, PastRound, Store

_MOST_RUNS = 16
"""Runs that are remembered as open: a federation has one after the other."""

Say = Callable[..., None]


@dataclass(eq=False)
class RoundDesk:
    """One round at a time, in a worker thread; everything else is called on the agent's thread.

    ``work`` does a round, ``read`` reads an announcement whose offers are elsewhere, ``send`` publishes what was declined,
    ``say`` tells people, and ``dropped`` of what is of no use any more. ``session`` wakes the agent. ``format`` is
    the engine's, ``retry_pause_s`` the least time between attempts, ``stopping`` the agent's end.
    """

    session: Session
    store: Store
    outbox: Outbox
    progress: ProgressMessages
    _: KW_ONLY
    format: str
    retry_pause_s: float
    stopping: threading.Event
    work: Callable[[Job], None]
    read: Callable[[Round], Round]
    send: Callable[[Decline], object]
    say: Say
    dropped: Tell

    def __post_init__(self) -> None:
        self.announced: Round | None = None
        self.task: Task | None = None
        self._reading: BlobRef | None = None
        self._page: tuple[BlobRef, Round] | None = None
        """The last page that was read, and the announcement with what it offers."""
        self._job: Job | None = None
        self._worker: threading.Thread | None = None
        self._idle = threading.Event()
        self._seen_open: deque[str] = deque(maxlen=_MOST_RUNS)
        self._resumed = False
        """The process began with work of an earlier process that ended early."""
        self._failed: dict[str, float] = {}
        self._told_failure = ("", "")
        self._begun: set[str] = set()
        self._at_rest = False
        """There is nothing to do until the server says something, or a worker ends, and no update waits."""

    # -- what the server says --------------------------------------------------------------------------------

    def announce(self, announced: Round) -> None:
        """Where the run is."""
        self._at_rest = False
        if self.announced is None:
            self._resumed = not self.is_idle()
        self.announced = announced
        if announced.state == "open" and announced.run not in self._seen_open:
            self._seen_open.append(announced.run)
        self._drop_abandoned()
        self._remind()

    def assign(self, task: Task) -> None:
        """What this device is to do."""
        self._at_rest = False
        self.task = task
        self._remind()

    def _remind(self) -> None:
        """The server speaks of a round: it may have lost what we sent, so updates that wait and what we declined of this
        round are sent again."""
        if self.store.any_waits():
            self.outbox.send_again()
        self.declare()

    def declare(self) -> None:
        """Say again what was declined of the open round: there is no acknowledgement of it."""
        if self.announced is None:
            return
        for number in self.announced.takes:
            for past in self.store.declined(self.announced.run, number):
                self._send_decline(past)

    # -- where it stands -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a worker is there, also one that has just ended."""
        return self._worker is not None

    def is_idle(self) -> bool:
        """Whether nothing is being worked on, and nothing waits to be sent."""
        return self._worker is None and self.store.job() is None and not self.store.any_waits()

    def is_over(self) -> bool:
        """Whether the job in hand is of no use any more."""
        job, announced = self._job, self.announced
        if self.stopping.is_set():
            return True
        if self._reading is not None:
            return announced is None or announced.state != "open" or announced.pages != self._reading
        if job is None or announced is None:
            return False
        return not job.is_open(announced) or job.is_replaced(self.task)

    def round_without_us(self) -> Round | None:
        """Return the open round, if this process was given no task so far."""
        announced = self.announced
        idle = self.task is None and self._worker is None
        return announced if idle and announced is not None and announced.state == "open" else None

    def took_part(self) -> bool:
        """Whether this device had a task in the run, in a process before this one."""
        run = self.announced.run if self.announced is not None else ""
        return any(past.run == run for past in self.store.history())

    def is_done(self) -> bool:
        """Whether the run that this device was part of is over, and nothing of it waits here."""
        announced = self.announced
        if announced is None or announced.state != "done":
            return False
        # The retained "done" of an earlier run must not send a device away before the next run begins.
        ours = announced.run in self._seen_open or (self._resumed and self.took_part())
        return ours and not self.store.any_waits() and self._worker is None

    # -- working ---------------------------------------------------------------------------------------------

    def collect(self) -> bool:
        """Whether a round's worker has ended since this was last asked, in whatever way."""
        if self._worker is None or not self._idle.is_set():
            return False
        self._worker.join()
        self._worker = None
        self._job = None
        self._at_rest = False
        self._drop_abandoned()  # its last step may have been made after its round was over
        return True

    def begin(self) -> None:
        """Start the round that is open and ours, unless it is done, failed a moment ago, or already running.

        Nothing begins once the agent stops: its worker may have ended within the agent's last turn.
        """
        busy = self.stopping.is_set() or self._worker is not None
        if busy or self._at_rest or self.announced is None:
            return
        whole = self._whole(self.announced)
        if whole is None:
            self._begin_page(self.announced)
            return
        # First: the outbox thread may drop an update that cannot be read, and it is made anew.
        waits = self.store.any_waits()
        job = self._next_job(whole)
        self._at_rest = job is None and not waits
        if job is None or time.monotonic() < self._failed.get(job.nonce, 0.0):
            return
        self._job = job
        self._start(f"round-{job.round}", lambda: self._attempt(job))

    def _start(self, name: str, work: Callable[[], None]) -> None:
        self._idle.clear()
        self._worker = threading.Thread(target=work, name=name, daemon=True)
        self._worker.start()

    def _whole(self, announced: Round) -> Round | None:
        """With all that it offers; None while that is to be read."""
        if announced.pages is None:
            return announced
        if self._page is None or self._page[0] != announced.pages:
            return None
        read = self._page[1]
        return msgspec.structs.replace(
            announced, offers=read.offers, units=read.units, live=read.live, pages=None
        )

    def _begin_page(self, announced: Round) -> None:
        """Have it read what the announcement offers, if this device takes part."""
        page = announced.pages
        if page is None or time.monotonic() < self._failed.get(page.sha256, 0.0):
            return
        waits = self.store.any_waits()  # first, as above
        if self._takes_part(announced):
            self._reading = page
            self._start("page", lambda: self._attempt_page(page, announced))
        else:
            self._at_rest = not waits

    def _takes_part(self, announced: Round) -> bool:
        data, task = self.store.job(), self.task
        job = None if data is None else decode_job(data)
        if job is not None and job.is_open(announced) and not job.is_replaced(task):
            return True
        if data is not None:
            self.store.close_job()
        if task is None or task.run != announced.run or task.round not in announced.takes:
            return False
        return not self.store.waits(task.nonce) and self.store.past(task.nonce) is None

    def _attempt_page(self, page: BlobRef, announced: Round) -> None:
        """The worker thread."""
        try:
            self._page = page, self.read(announced)
        except RoundAborted:
            pass  # another one is announced
        except EdgeflError as error:
            tier = self.task.tier if self.task is not None else ""
            self._fail(page.sha256, announced.round, tier, error)
        finally:
            self._reading = None
            self._idle.set()
            self.session.wake()

    def join(self, timeout_s: float) -> bool:
        """Whether no worker is left after so many seconds: one in a long step ends with the process."""
        if self._worker is None:
            return True
        self._worker.join(timeout=timeout_s)
        return not self._worker.is_alive()

    def _next_job(self, announced: Round) -> Job | None:
        kept_job = self._kept_job(announced)
        if kept_job is not None:
            return kept_job
        form = self.format
        job = Job.of(self.task, announced, form) if self.task is not None else None
        # In this order: the outbox thread may move an update from waiting to past between the two questions.
        if job is None or self.store.waits(job.nonce) or self.store.past(job.nonce) is not None:
            return None
        return self._tried(job, None)

    def _kept_job(self, announced: Round) -> Job | None:
        """The job of a killed process or a failed attempt, as its round is announced now; dropped if that is over.

        A server that was started again may announce the same round with other chunks, another bundle or another key.
        """
        data = self.store.job()
        if data is None:
            return None
        job = decode_job(data)
        now = job.following(announced, self.format) if job is not None else None
        if job is None or now is None or job.is_replaced(self.task):
            self.store.close_job()
            return None
        return self._tried(now, job, fresh=now.content != job.content)

    def _tried(self, job: Job, kept: Job | None, *, fresh: bool = False) -> Job:
        """The job as it is kept from now on, in place of ``kept``. The first attempt of each process counts: one that ends
        the process is not made for ever."""
        if kept is None or job.nonce not in self._begun:
            job = msgspec.structs.replace(job, tries=job.tries + 1)
        if job != kept:
            self.store.open_job(encode_job(job), fresh=fresh)
        self._begun = {job.nonce}
        return job

    def _attempt(self, job: Job) -> None:
        """The worker thread: one round, from the first blob to the outbox."""
        try:
            self._perform(job)
        except RoundAborted as error:
            if self.stopping.is_set():
                with suppress(StoreError):  # it ended in good order
                    self.store.open_job(encode_job(msgspec.structs.replace(job, tries=job.tries - 1)))
                text = f"round {job.round} is left as it is: this device goes on with it when it is started again"
                self.say("stopped", text, round=job.round)
            else:
                self.say("aborted", error.message, round=job.round)
        except Exception as error:  # an engine's own exception must not end the agent
            self._fail(job.nonce, job.round, job.tier, error)
        finally:
            self._idle.set()
            self.session.wake()

    def _perform(self, job: Job) -> None:
        try:
            self.work(job)
            self.outbox.wake()
        except RoundDeclined as declined:
            self._decline(job, declined)
        except DataError as error:  # another round, or another bundle, may fit
            self.say("data", error.message, round=job.round)
            self._decline(job, RoundDeclined(WRONG_DATA, error.message))

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
        self.store.decline(past)
        self._send_decline(past)
        self.say("declined", f"round {job.round} ({declined.reason}): {declined.message}", round=job.round)

    def _send_decline(self, past: PastRound) -> None:
        self.send(Decline(round=past.round, nonce=past.nonce, reason=past.reason))

    def _drop_abandoned(self) -> None:
        with suppress(StoreError):  # a full disk: the next announcement finds it again
            if self.announced is not None:
                drop_abandoned(self.store, self.announced, self.dropped)

    def _fail(self, key: str, number: int, tier: str, error: Exception) -> None:
        """An attempt at what ``key`` names, of round ``number``."""
        reason = error.message if isinstance(error, EdgeflError) else f"{type(error).__name__}: {error}"
        self._failed[key] = time.monotonic() + self.retry_pause_s
        self.progress.failed(number, tier, error)
        if (key, reason) == self._told_failure:  # it tries every second, and people have read it
            return
        self._told_failure = key, reason
        self.say("failed", f"round {number} failed: {reason}; trying again while it is open", round=number)

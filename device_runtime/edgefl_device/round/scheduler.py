"""Scheduling of a device's rounds: chooses the round, runs it on a thread, and handles the thread's result."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from edgefl.errors import DataError, EdgeflError, RoundAborted, RoundDeclined, StoreError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.events import Event, Inbox
from edgefl.wire.mqtt.messages import FAILED, WRONG_DATA, Decline, Progress, Round, Task
from edgefl.wire.mqtt.reasons import failure_code
from edgefl.wire.mqtt.topics import DeviceTopics
from edgefl_device.host import anonymous_bytes
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import SignedSession
from edgefl_device.link.outbox import Outbox
from edgefl_device.round.carry import drop_abandoned
from edgefl_device.round.control import RoundControl, StepProgress
from edgefl_device.round.executor import RoundExecutor, with_page
from edgefl_device.round.job import Job, decode_job, encode_job
from edgefl_device.store.database import DECLINED, PastRound

_MOST_RUNS = 16
"""Runs that are remembered as open: a federation has one after the other."""
_PROGRESS_PERIOD_S = 0.2


@dataclass(frozen=True)
class RoundOutcome:
    """Message of the round's thread at its end. ``error`` is None if an update is in the outbox."""

    job: Job
    error: Exception | None


@dataclass(frozen=True)
class PageOutcome:
    """Message of the thread that downloaded a page (blob with the offers of a large announcement).

    Attributes:
        page: Reference of the page.
        announced: The announcement without its offers.
        result: The announcement with all of its offers, or the error.
    """

    page: BlobRef
    announced: Round
    result: Round | Exception


AgentInbox = Inbox[Event | RoundOutcome | PageOutcome]


class RoundScheduler:
    """Scheduler of the device's rounds, one at a time on a thread of its own.

    Its methods are called on the agent's thread.

    At its end the thread puts :class:`RoundOutcome` or :class:`PageOutcome` into ``inbox``; then call :meth:`finish`.

    Args:
        executor: Runs a round.
        fetcher: Its ``cancelled`` event ends the work of the thread.
        outbox: Sends updates.
        progress: Publishes steps and failed attempts.
        inbox: The agent's inbox.
    """

    def __init__(
        self,
        executor: RoundExecutor,
        fetcher: Fetcher,
        outbox: Outbox,
        progress: ProgressMessages,
        inbox: AgentInbox,
    ) -> None:
        self.announced: Round | None = None
        self.task: Task | None = None
        self.executor = executor
        self._store = executor.store
        self._log = executor.log
        self._format = executor.engine.format
        self._limits = executor.config.limits
        self._fetcher = fetcher
        self._cancelled = fetcher.cancelled
        self._outbox = outbox
        self._progress = progress
        self._inbox = inbox
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._job: Job | None = None
        self._reading: BlobRef | None = None
        self._result: RoundOutcome | PageOutcome | None = None
        self._page: tuple[BlobRef, Round] | None = None
        """The last page that was read, and the announcement with all that it offers."""
        self._seen_open: deque[str] = deque(maxlen=_MOST_RUNS)
        self._resumed = False
        """True if the process began with work of an earlier process that ended early."""
        self._retry_at: dict[str, float] = {}
        self._reported_failure = ("", "")
        self._begun: set[str] = set()
        self._is_at_rest = False
        """True if there is nothing to do until a message or the end of a thread, and no update waits."""

    # -- messages of the server ------------------------------------------------------------------------------

    def announce(self, announced: Round) -> list[Decline]:
        """Handle an announcement: cancel work on closed rounds, send stored updates again. Return the declines to
        publish.
        """
        if self.announced is None:
            self._resumed = not self.is_idle()
        self.announced = announced
        if announced.state == "open" and announced.run not in self._seen_open:
            self._seen_open.append(announced.run)
        self._drop_abandoned()
        return self._answer()

    def assign(self, task: Task) -> list[Decline]:
        """Handle a task, which replaces the previous one. Return the declines to publish."""
        self.task = task
        return self._answer()

    def _answer(self) -> list[Decline]:
        """Cancel work whose result is not needed, and send stored updates again.

        Return all declines to publish, because the server may have lost earlier ones.
        """
        self._is_at_rest = False
        if self._is_over():
            self._cancelled.set()
        if self._store.any_waits():
            self._outbox.send_again()
        return self.declines()

    def declines(self) -> list[Decline]:
        """Return the stored declines of the open rounds. They are published repeatedly, as they have no acknowledgement."""
        if self.announced is None:
            return []
        run = self.announced.run
        return [
            decline_message(past)
            for number in self.announced.takes
            for past in self._store.declined(run, number)
        ]

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while a thread works, or has ended and :meth:`finish` was not called yet."""
        return self._thread is not None

    def is_idle(self) -> bool:
        """Return True if no thread works, no job is stored, and the outbox is empty."""
        return self._thread is None and self._store.job() is None and not self._store.any_waits()

    def _is_over(self) -> bool:
        """Return True if the result of the running thread is not needed any more: its round is closed, or a newer task
        replaces its job.
        """
        job, announced = self._job, self.announced
        if self._reading is not None:
            return announced is None or announced.state != "open" or announced.pages != self._reading
        if job is None or announced is None:
            return False
        return not job.is_open(announced) or job.is_replaced(self.task)

    def round_without_us(self) -> Round | None:
        """Return the open round if this process has received no task so far, else None."""
        announced = self.announced
        idle = self.task is None and self._thread is None
        return announced if idle and announced is not None and announced.state == "open" else None

    def took_part(self) -> bool:
        """Return True if the store's history has a task of the announced run, of this process or an earlier one."""
        run = self.announced.run if self.announced is not None else ""
        return any(past.run == run for past in self._store.history())

    def is_done(self) -> bool:
        """Return True if the run in which this device took part is over and the outbox is empty."""
        announced = self.announced
        if announced is None or announced.state != "done":
            return False
        # The retained "done" of an earlier run must not send a device away before the next run begins.
        ours = announced.run in self._seen_open or (self._resumed and self.took_part())
        return ours and not self._store.any_waits() and self._thread is None

    # -- work ------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Start work on the open round if this device has a task in it and no work is running.

        Nothing is started if the task is done, or for a pause after it failed.
        """
        announced = self.announced
        if self._stopping or self._thread is not None or self._is_at_rest or announced is None:
            return
        # First: the outbox thread may drop an update that cannot be read, and it is made anew.
        waits = self._store.any_waits()
        page = announced.pages
        if page is not None and (self._page is None or self._page[0] != page):
            if time.monotonic() < self._retry_at.get(page.sha256, 0.0):
                return
            if self._takes_part(announced):
                self._reading = page
                self._start(
                    threading.Thread(target=self._read_page, args=(page, announced), name="page", daemon=True)
                )
            else:
                self._is_at_rest = not waits
            return
        if page is not None and self._page is not None:
            read = self._page[1]
            announced = msgspec.structs.replace(
                announced, offers=read.offers, units=read.units, live=read.live, pages=None
            )
        job = self.next_job(announced)
        self._is_at_rest = job is None and not waits
        if job is None or time.monotonic() < self._retry_at.get(job.nonce, 0.0):
            return
        self._job = job
        self._start(threading.Thread(target=self._run, args=(job,), name=f"round-{job.round}", daemon=True))

    def finish(self) -> list[Decline]:
        """Handle the result of the ended thread: store a decline or report a failure. Return the declines to publish."""
        result, thread = self._result, self._thread
        if result is None or thread is None:
            return []
        thread.join()
        self._thread = self._job = self._reading = self._result = None
        self._is_at_rest = False
        self._drop_abandoned()  # the last step may have been made after its round was over
        if isinstance(result, PageOutcome):
            if isinstance(result.result, Round):
                self._page = result.page, result.result
            elif not isinstance(result.result, RoundAborted):  # else another one is announced
                tier = self.task.tier if self.task is not None else ""
                self._fail(result.page.sha256, result.announced.round, tier, result.result)
            return []
        return self._finish_round(result.job, result.error)

    def _finish_round(self, job: Job, error: Exception | None) -> list[Decline]:
        match error:
            case None:
                self._outbox.wake()
            case RoundAborted() if self._stopping:
                with suppress(StoreError):  # the attempt does not count: it ended in good order
                    self._store.open_job(encode_job(msgspec.structs.replace(job, tries=job.tries - 1)))
                text = f"round {job.round} is left as it is: this device goes on with it when it is started again"
                self._log.event("stopped", text, round=job.round)
            case RoundAborted():
                self._log.event("aborted", error.message, round=job.round)
            case RoundDeclined():
                return self._decline(job, error)
            case DataError():  # another round, or another bundle, may fit
                self._log.event("data", error.message, round=job.round)
                return self._decline(job, RoundDeclined(WRONG_DATA, error.message))
            case _:
                self._fail(job.nonce, job.round, job.tier, error)
        return []

    def close(self, timeout_s: float) -> bool:
        """Cancel the work, and wait up to ``timeout_s`` seconds for the thread.

        Returns:
            True if no thread is left. A thread in a longer step ends with the process.
        """
        self._stopping = True
        self._cancelled.set()
        if self._thread is None:
            return True
        self._thread.join(timeout=timeout_s)
        if self._thread.is_alive():
            self.executor.interrupt()
            return False
        self.finish()
        return True

    def next_job(self, announced: Round) -> Job | None:
        """Return the job to work on, with the fields of ``announced``: a begun job, else that of the current task.

        Return None if there is neither.
        """
        if (job := self._begun_job(announced)) is not None:
            return job
        job = Job.of(self.task, announced, self._format) if self.task is not None else None
        # In this order: the outbox thread may move an update from waiting to past between the two questions.
        if job is None or self._store.waits(job.nonce) or self._store.past(job.nonce) is not None:
            return None
        return self._store_job(job, None)

    def _begun_job(self, announced: Round) -> Job | None:
        """Return the stored job of a killed process or failed attempt, with the fields of ``announced``.

        Delete the stored job and return None if its round is over or a newer task replaces it. A server that was
        started again may announce the same round with other chunks, another bundle or another key; the checkpoint is
        then deleted.
        """
        data = self._store.job()
        if data is None:
            return None
        job = decode_job(data)
        now = job.following(announced, self._format) if job is not None else None
        if job is None or now is None or job.is_replaced(self.task):
            self._store.close_job()
            return None
        return self._store_job(now, job, fresh=now.content != job.content)

    def _store_job(self, job: Job, stored: Job | None, *, fresh: bool = False) -> Job:
        """Store ``job`` if it differs from ``stored``, and return it as stored. The first attempt of this process
        counts as one more try.

        Counting processes ensures that a round that crashes the process is not tried forever. ``fresh`` deletes the
        checkpoint.
        """
        if stored is None or job.nonce not in self._begun:
            job = msgspec.structs.replace(job, tries=job.tries + 1)
        if job != stored:
            self._store.open_job(encode_job(job), fresh=fresh)
        self._begun = {job.nonce}
        return job

    def _takes_part(self, announced: Round) -> bool:
        """Return True if this device has work in the round, decided before the announcement's offers (bundles) are
        downloaded. Drops a stale job.
        """
        data, task = self._store.job(), self.task
        job = None if data is None else decode_job(data)
        if job is not None and job.is_open(announced) and not job.is_replaced(task):
            return True
        if data is not None:
            self._store.close_job()
        if task is None or task.run != announced.run or task.round not in announced.takes:
            return False
        return not self._store.waits(task.nonce) and self._store.past(task.nonce) is None

    # -- the thread ------------------------------------------------------------------------------------------

    def _start(self, thread: threading.Thread) -> None:
        self._cancelled.clear()
        self._thread = thread
        thread.start()

    def _run(self, job: Job) -> None:
        """Execute one round on the worker thread, and put its outcome into the inbox."""
        executor = self.executor
        control = RoundControl(
            job, limits=self._limits, rules=executor.rules, progress=self._progress, cancelled=self._cancelled
        )
        error: Exception | None = RoundAborted("the round's thread ended")
        try:
            executor.execute(job, control)
            error = None
        except Exception as raised:  # an engine's own exception must not end the agent
            error = raised.with_traceback(None)  # whose frames hold the round's arrays
        finally:
            self._end(RoundOutcome(job, error))

    def _read_page(self, page: BlobRef, announced: Round) -> None:
        result: Round | Exception = RoundAborted("the page's thread ended")
        try:
            result = with_page(announced, self._fetcher, self._limits)
        except EdgeflError as error:
            result = error
        finally:
            self._end(PageOutcome(page, announced, result))

    def _end(self, result: RoundOutcome | PageOutcome) -> None:
        self._result = result
        self._inbox.put(result)

    # -- failures --------------------------------------------------------------------------------------------

    def _decline(self, job: Job, declined: RoundDeclined) -> list[Decline]:
        """Store a decline, and return its message. It is sent again until the round is over, and the job is never tried
        again.

        If the store fails, report a failed attempt instead and return [].
        """
        past = PastRound(
            run=job.run,
            round=job.round,
            tier=job.tier,
            nonce=job.nonce,
            outcome=DECLINED,
            reason=declined.reason,
            text=declined.message,
        )
        try:
            self._store.decline(past)
        except StoreError as error:  # a full disk
            self._fail(job.nonce, job.round, job.tier, error)
            return []
        text = f"round {job.round} ({declined.reason}): {declined.message}"
        self._log.event("declined", text, round=job.round)
        return [decline_message(past)]

    def _drop_abandoned(self) -> None:
        with suppress(StoreError):  # a full disk: the next announcement drops them
            if self.announced is not None:
                drop_abandoned(self._store, self.announced, self._log)

    def _fail(self, key: str, number: int, tier: str, error: Exception) -> None:
        """Report a failed attempt, and pause before the next one.

        Args:
            key: Nonce of the task, or digest of the page.
            number: Number of the round.
            tier: The device's tier.
            error: Reason of the failure.
        """
        reason = error.message if isinstance(error, EdgeflError) else f"{type(error).__name__}: {error}"
        self._retry_at[key] = time.monotonic() + self._limits.retry_pause_s
        self._progress.failed(number, tier, error)
        if (key, reason) != self._reported_failure:  # attempts repeat every second, their report does not
            self._reported_failure = key, reason
            self._log.event(
                "failed", f"round {number} failed: {reason}; trying again while it is open", round=number
            )


class ProgressMessages:
    """Publisher of the steps of rounds, at most five a second or as often as the task asks, and of failed attempts."""

    def __init__(self, session: SignedSession, topics: DeviceTopics, fetcher: Fetcher) -> None:
        self._session = session
        self._topic = topics.progress
        self._fetcher = fetcher
        self._last = 0.0

    def step_done(self, job: Job, step: StepProgress) -> None:
        """Publish a step if enough time has passed since the last one.

        The last step of a stage is always published, unless the task sets a slower rate.
        """
        now = time.monotonic()
        is_paced = job.progress_s > _PROGRESS_PERIOD_S
        is_last = step.step >= step.steps and not is_paced
        if is_last or now - self._last >= max(_PROGRESS_PERIOD_S, job.progress_s):
            self._last = now
            self._publish(job.round, job.tier, step)

    def failed(self, round: int, tier: str, error: Exception) -> None:
        """Publish the code of a failed attempt. The round is tried again while it is open."""
        self._publish(round, tier, StepProgress(f"{FAILED}{failure_code(error)}", 0, 0, float("nan"), 0.0))

    def _publish(self, round: int, tier: str, step: StepProgress) -> None:
        progress = Progress(
            round=round,
            tier=tier,
            stage=step.stage,
            step=step.step,
            steps=step.steps,
            loss=step.loss,
            step_ms=step.step_ms,
            peak_bytes=anonymous_bytes(),
            down_bytes=self._fetcher.received_bytes + self._fetcher.mirrors.fresh_bytes,
            up_bytes=0,
        )
        self._session.publish(self._topic, progress, qos=0)


def decline_message(past: PastRound) -> Decline:
    """Return the message of a stored decline, without its details: they may contain paths and values of the data."""
    return Decline(round=past.round, nonce=past.nonce, reason=past.reason)

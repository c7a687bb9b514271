"""Orders of operators to a running server, and measurements of its load.

Orders are files in the folder ``orders`` of the run. They are written atomically, polled by the server, and deleted
after they were carried out or refused. Anyone with write access to the folder can send orders; the dashboard requires
a token.
"""

from __future__ import annotations

import mmap
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgefl.errors import StoreError
from edgefl.system.files import make_folder, write_whole
from edgefl.wire.mqtt.events import EventSink
from edgefl.wire.text import printable
from edgefl_server import events
from edgefl_server.coordinator import states
from edgefl_server.coordinator.states import State

FOLDER = "orders"
_PAUSED = "paused"
_MOST_BYTES = 4096


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="order", tag=str.lower):
    """Base of all orders. ``by`` is the origin of the order, ``at`` its time in epoch seconds."""

    by: str = ""
    at: float = 0.0

    @property
    def name(self) -> str:
        """Name of the order, as in its JSON."""
        return type(self).__name__.lower()


class Pause(Order, frozen=True, kw_only=True):
    """Order to open no further round after the current one."""


class Resume(Order, frozen=True, kw_only=True):
    """Order to resume after a pause."""


class Drain(Order, frozen=True, kw_only=True):
    """Order to close the open round and then stop the server. A restarted server resumes the run."""


class RollBack(Order, frozen=True, kw_only=True, tag="rollback"):
    """Order to restore the model after round ``version`` once no round is open. The rounds since then count as
    abandoned.
    """

    version: int

    @property
    def name(self) -> str:
        return "rollback"


AnyOrder = Pause | Resume | Drain | RollBack
_decode = msgspec.json.Decoder(AnyOrder).decode


def read(data: bytes) -> AnyOrder:
    """Decode an order from JSON, such as ``{"order":"rollback","version":7}``.

    Raises:
        ValueError: If the data are not a valid order.
    """
    try:
        order: AnyOrder = _decode(data)
        return order
    except UnicodeDecodeError as error:
        raise ValueError("an order is JSON in UTF-8") from error


class Mailbox:
    """Mailbox for operators' orders in the run's folder: one file per order, and a mark that the run is paused."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER

    def send(self, order: AnyOrder) -> None:
        """Write an order, durable before this returns. The server reads it soon.

        Raises:
            OSError: If the order cannot be written.
        """
        make_folder(self._folder)
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
        write_whole(self._folder / name, msgspec.json.encode(order), durable=True)

    def waiting(self) -> Iterator[tuple[Path, AnyOrder | None]]:
        """Yield (file, order) for each pending order, the oldest first. The order is None if the file is invalid.

        The files stay until :meth:`remove`.
        """
        for path in sorted(self._folder.glob("*.json")):
            try:
                with path.open("rb") as file:
                    yield path, read(file.read(_MOST_BYTES))
            except ValueError:
                yield path, None
            except OSError:  # gone meanwhile
                continue

    def remove(self, path: Path) -> None:
        """Delete the file of a handled order. If that fails, the next server process handles the order again."""
        with suppress(OSError):
            path.unlink(missing_ok=True)

    @property
    def paused(self) -> bool:
        """Return True if the run is paused. The mark is a file, so it survives a restart."""
        return (self._folder / _PAUSED).exists()

    def pause(self, *, on: bool) -> None:
        """Store (``on``) or delete the mark that the run is paused.

        Raises:
            OSError: If the file cannot be changed.
        """
        if on:
            make_folder(self._folder)
            write_whole(self._folder / _PAUSED, b"", durable=True)
        else:
            (self._folder / _PAUSED).unlink(missing_ok=True)


# Carries out an operator's orders, between two rounds where that matters. The result of each is reported and audited.

_MOST_BY = 64


@dataclass(frozen=True)
class QueuedOrder:
    """Item of the service's inbox: an order and its file. The order is None if the file is invalid."""

    path: Path
    order: AnyOrder | None


class RunControl(Protocol):
    """Interface to the run that operators' orders change."""

    @property
    def state(self) -> State:
        """Current state of the coordinator."""

    def dispatch(self, event: states.Event) -> None:
        """Pass an event to the coordinator and perform the actions that follow."""

    def halt(self) -> None:
        """Stop the service. The run can be resumed by another process."""


class ModelHistory(Protocol):
    """Interface to the models of the run, for rollbacks."""

    def rollback_refusal(self, number: int) -> str:
        """Return the reason why the model after round ``number`` cannot be restored; an empty text if it can."""

    def roll_back(self, number: int) -> None:
        """Restore the model after round ``number``. The later rounds count as abandoned.

        Raises:
            StoreError: If its checkpoint cannot be read.
        """


class OrderExecutor:
    """Executor of the orders from ``mailbox``.

    Args:
        mailbox: Mailbox of the run.
        control: The run that the orders change.
        models: Models of the run, for rollbacks.
        reporter: Receives the result of each order.
    """

    def __init__(
        self, mailbox: Mailbox, control: RunControl, models: ModelHistory, reporter: events.EventListener
    ) -> None:
        self._mailbox = mailbox
        self._control = control
        self._models = models
        self._reporter = reporter
        self._due: list[QueuedOrder] = []

    @property
    def holds(self) -> bool:
        """Return True if no round may open yet: the run is paused, or a pending order is a drain or a rollback."""
        return self._mailbox.paused or any(
            isinstance(order, Drain | RollBack) for _, order in self._mailbox.waiting()
        )

    def take(self, queued: QueuedOrder) -> None:
        """Carry out an order at once, or queue it until no round is open (drains and rollbacks).

        The result of a finished order is reported, and its file deleted.
        """
        match queued.order:
            case Pause() | Resume():
                text = self._store_pause(on=isinstance(queued.order, Pause))
                self._end(queued, done=not text, text=text)
                self._hold()
            case Drain():
                self._due.append(queued)
                self._hold()
            case RollBack(version=version):
                if text := self._models.rollback_refusal(version):
                    self._end(queued, done=False, text=text)
                else:
                    self._due.append(queued)
                self._hold()
            case None:
                self._reporter.emit(
                    events.Ordered(order="unknown", by="", done=False, text="it cannot be read")
                )
                self._mailbox.remove(queued.path)

    def _store_pause(self, *, on: bool) -> str:
        """Store or delete the pause mark. Return the error text if that fails; empty on success."""
        try:
            self._mailbox.pause(on=on)
        except OSError as error:
            return f"{error.filename or 'the folder of orders'} cannot be written ({error.strerror}): free some space there"
        return ""

    def step(self, *, judged: bool) -> None:
        """Carry out the oldest queued order (a drain or a rollback) if no round is open.

        ``judged`` is True if the evaluations of all ended rounds are finished; a rollback waits for them.
        """
        if not self._due or self._control.state.phase != "waiting":
            return
        queued = self._due[0]
        if isinstance(queued.order, Drain):
            self._due.remove(queued)
            self._end(queued, done=True)
            self._control.halt()
        elif isinstance(queued.order, RollBack) and judged:
            self._due.remove(queued)
            self._roll_back(queued, queued.order.version)
            self._hold()

    def _roll_back(self, queued: QueuedOrder, version: int) -> None:
        text = self._models.rollback_refusal(version)  # rounds have ended since it came
        if not text:
            try:
                self._models.roll_back(version)
            except StoreError as error:
                text = error.message
        model = self._control.state.model_version[:12]
        result = text or f"the model is that after round {version} again, {model}"
        self._end(queued, done=not text, text=result, version=version)

    def _hold(self) -> None:
        self._control.dispatch(states.Hold(bool(self._due) or self._mailbox.paused))

    def _end(self, queued: QueuedOrder, *, done: bool, text: str = "", version: int = -1) -> None:
        assert queued.order is not None
        by = printable(queued.order.by, _MOST_BY)
        self._reporter.emit(
            events.Ordered(order=queued.order.name, by=by, done=done, text=text, version=version)
        )
        self._mailbox.remove(queued.path)


# A thread beside the service: looks for orders, and times how long messages wait at the server and at the broker.

_PAUSE_S = 0.5
_VITALS_S = 5.0
_BROKER_S, _BROKER_AGAIN_S = 5.0, 2.0
"""Longest wait for the broker to confirm a timed message, and time between two such measurements, in seconds."""
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class LatencyProbe:
    """Item that measures the delay of the service's inbox. ``at`` is the time at which it was queued, in monotonic
    seconds.
    """

    at: float


class PendingDelivery(Protocol):
    """Sent message that the broker may not have acknowledged yet."""

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` seconds for the acknowledgement. Return False on timeout."""


class OrderWatcher:
    """Thread that puts pending orders and latency probes into the service's ``inbox``, from :meth:`start` until
    :meth:`stop`.
    """

    def __init__(self, mailbox: Mailbox, inbox: EventSink[Any]) -> None:
        self._mailbox = mailbox
        self._inbox = inbox
        self._seen: set[Path] = set()
        self._timed: PendingDelivery | None = None
        self._timed_at = 0.0
        self._broker_lag_s = -1.0
        self._due = self._time_again = 0.0
        self._probing = False
        self._ended, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="operations", daemon=True)

    def start(self) -> None:
        """Queue the pending orders, then start the thread."""
        self._queue_orders()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def time_delivery(self, delivery: PendingDelivery) -> None:
        """Measure the broker's delay by this delivery, if the last measurement is old enough. Does not block."""
        now = time.monotonic()
        if self._timed is None and now >= self._time_again:
            self._timed_at, self._time_again = now, now + _BROKER_AGAIN_S
            self._timed = delivery
            self._wake.set()

    def vitals(self, probe: LatencyProbe, inbox: int) -> events.Vitals:
        """Return the load of the server.

        Args:
            probe: Probe that has just left the inbox. Its age is reported as the delay of the inbox.
            inbox: Number of queued messages.
        """
        self._probing = False
        return events.Vitals(
            inbox=inbox,
            server_lag_s=round(time.monotonic() - probe.at, 6),
            broker_lag_s=round(self._broker_lag_s, 6),
            cpu_s=round(time.process_time(), 3),
            rss_bytes=_resident(),
        )

    def _run(self) -> None:
        while not self._ended.is_set():
            if self._wake.wait(_PAUSE_S):
                self._wake.clear()
                self._time()
                continue
            self._queue_orders()
            if time.monotonic() >= self._due and not self._probing:
                self._due, self._probing = time.monotonic() + _VITALS_S, True
                self._inbox.put(LatencyProbe(time.monotonic()))

    def _queue_orders(self) -> None:
        for path, order in self._mailbox.waiting():
            if path not in self._seen:
                self._seen.add(path)
                self._inbox.put(QueuedOrder(path, order))

    def _time(self) -> None:
        """Wait up to five seconds until the broker confirms the timed delivery, and store the time that it took.

        On timeout the earlier measurement is kept.
        """
        if self._timed is None:
            return
        if self._timed.wait(_BROKER_S):
            self._broker_lag_s = time.monotonic() - self._timed_at
        self._timed = None


def _resident() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        return int(_STATM.read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0

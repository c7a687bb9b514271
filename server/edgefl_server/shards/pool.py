"""Pool of aggregation workers: starts them, sends them the rounds, merges their sums, and replaces those that died.

The order at the end of a round makes ``kill -9`` of a worker harmless. The round is first closed in the journal; no
worker can commit an update after that (:func:`edgefl_server.storage.round_table.close`). Then each worker returns its
sum and the digest of the updates in it. If the digest differs from the journal, or the worker is gone, the server
adds these updates itself. Sums are integers, so the result has the same bits in both cases.
"""

from __future__ import annotations

import queue
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from edgefl.config.rounds import ServerTable
from edgefl.errors import ConfigError, StoreError
from edgefl.system.clock import Clock
from edgefl.system.memory import cores
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.events import Inbox
from edgefl_server.aggregate.aggregator import PartialSum
from edgefl_server.coordinator.fleet import Assignments
from edgefl_server.coordinator.states import Answers, OpenRound, Outage, State
from edgefl_server.events import Noted, Warned
from edgefl_server.identity.registry import DeviceKey, Registry
from edgefl_server.message_handler import NOTHING, HandlerResult
from edgefl_server.reporter import EventReporter
from edgefl_server.round_aggregation import RoundAggregation, RoundAggregationSpec
from edgefl_server.run_spec import RunSpec
from edgefl_server.shards import messages
from edgefl_server.shards.messages import SHARDS, shards_of, worker_of
from edgefl_server.shards.worker import WorkerSettings
from edgefl_server.storage.retry import RetryingJournal
from edgefl_server.updates.receiver import stored_updates
from edgefl_server.workers.process import ProcessLauncher
from edgefl_server.workers.protocol import Died, Stop, WorkerHandle, WorkerLauncher

_SUM_S = 120.0
"""Seconds for a worker to add its waiting updates, before the server adds them itself."""
_KEYS_S = 1.0
"""Seconds between two comparisons of the devices' keys: `edgefl enroll revoke` takes effect then."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 10.0
"""Seconds before a worker that died is replaced: doubled each time, until one has lived for as long as the longest."""


@dataclass(frozen=True)
class WorkerOptions:
    """Number and kind of the workers.

    Attributes:
        count: Number of workers. With 0 or 1 the server receives all updates itself.
        launcher: Factory of the workers.
        updates: Folder or fsspec URL of the updates' bytes, which all workers can access. Default: a folder of
            the run.
    """

    count: int = 0
    launcher: WorkerLauncher = field(default_factory=ProcessLauncher)
    updates: str = ""

    @property
    def workers(self) -> int:
        """Number of workers, at most one a shard; 0 if the server receives all updates itself."""
        return min(self.count, SHARDS) if self.count > 1 else 0

    @classmethod
    def of(cls, table: ServerTable) -> WorkerOptions:
        """Return the options from the table ``server`` of a federation file.

        Raises:
            ConfigError: If the workers need Ray, which is not installed.
        """
        if not table.ray:
            return cls(table.workers, updates=table.updates)
        from edgefl_server.workers.ray_cluster import RayLauncher

        return cls(table.workers, RayLauncher(table.ray, min(table.workers, SHARDS)), table.updates)

    def check(self, spec: RunSpec) -> None:
        """Check that the aggregation of a run can be divided among workers.

        Raises:
            ConfigError: If the aggregation rule needs all updates in one process.
        """
        if not self.workers:
            return
        rule = spec.aggregate.rule
        if rule.buffered:
            raise ConfigError(
                f"the rule {rule.name} looks at all updates of a round at once, which no worker has: set server.workers to "
                "0, or choose the rule mean",
                rule=rule.name,
            )
        steps = [each.server.name for each in spec.exchanges if each.server.unfolds]
        if steps:
            raise ConfigError(
                f"the server's step {steps[0]!r} makes something else of each update before it is added, for which workers "
                "have no torch: set server.workers to 0",
                step=steps[0],
            )


@dataclass
class _Slot:
    """Place of one worker in the pool: its number and shards, the worker that fills it, and the time of the next launch."""

    number: int
    shards: range
    handle: WorkerHandle | None = None
    generation: int = 0
    launched_at: float = 0.0
    ready_round: int = 0
    pause_s: float = _FIRST_PAUSE_S
    launch_at: float | None = 0.0
    is_stalled: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)

    def send(self, command: messages.Command) -> None:
        if self.handle is not None:
            self.handle.send(command)


class _SlotSink:
    """Receiver of one worker's messages, on the worker's thread.

    Sums go to ``sums`` for :meth:`WorkerPool.end_round`, all others to ``inbox``, the report of the worker's death to
    both.
    """

    def __init__(self, slot: _Slot, sums: queue.SimpleQueue[messages.FromWorker], inbox: Inbox[Any]) -> None:
        self._number, self._generation = slot.number, slot.generation
        self._sums = sums
        self._inbox = inbox

    def put(self, message: messages.WorkerMessage, /) -> None:
        tagged = messages.FromWorker(self._number, self._generation, message)
        if isinstance(message, messages.RoundSum | Died):
            self._sums.put(tagged)
        if not isinstance(message, messages.RoundSum):
            self._inbox.put(tagged)


class WorkerPool:
    """Pool of processes or Ray actors that receive the updates of a run and sum them.

    Args:
        settings: Settings of the workers, without their numbers. With fewer than two workers the pool is empty, and
            the server receives all updates itself.
        launcher: Factory of the workers.
        journal: Journal that the workers write to.
        registry: Keys of the devices.
        reporter: Receives the workers' events and errors.
        inbox: Receives the workers' messages; pass them to :meth:`handle`.
        clock: Epoch seconds, never set back.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        launcher: WorkerLauncher,
        journal: RetryingJournal,
        registry: Registry,
        reporter: EventReporter,
        inbox: Inbox[Any],
        clock: Clock,
    ) -> None:
        self._settings = replace(settings, limits=_share(settings.limits, settings.workers))
        self._launcher = launcher
        self._journal = journal
        self._registry = registry
        self._reporter = reporter
        self._inbox = inbox
        self._clock = clock
        workers = settings.workers if settings.workers > 1 else 0
        self._slots = [_Slot(number, shards_of(number, workers)) for number in range(workers)]
        self._spec: RoundAggregationSpec | None = None
        self._sums: queue.SimpleQueue[messages.FromWorker] = queue.SimpleQueue()
        self._sent_keys: dict[str, tuple[DeviceKey, ...]] = {}
        self._compare_keys_at = 0.0
        self._has_noted_few = False
        self._stalled_since: float | None = None

    @property
    def has_workers(self) -> bool:
        """False if the server receives all updates itself."""
        return bool(self._slots)

    @property
    def is_stalled(self) -> bool:
        """True if a worker receives nothing because of a storage error, so that no deadline may pass."""
        return any(slot.is_stalled for slot in self._slots)

    @property
    def refused(self) -> Counter[str]:
        """Numbers of messages that workers did not read or store, by reason."""
        return sum((Counter(slot.counts) for slot in self._slots), Counter())

    def receives(self, device: str, number: int) -> bool:
        """Return True if an update of ``device`` for round ``number`` would be received now.

        False while the device's worker is missing or still lacks the round. Always True without workers.
        """
        return not self._slots or self._slot_of(device).ready_round == number

    def stop(self) -> None:
        """Stop all workers at the same time, and wait for their end."""
        handles = [slot.handle for slot in self._slots if slot.handle is not None]
        for handle in handles:
            handle.send(Stop())
        for handle in handles:
            handle.stop()
        for slot in self._slots:
            slot.handle = None

    # -- rounds ----------------------------------------------------------------------------------------------

    def begin(self, opened: OpenRound, aggregation: RoundAggregation) -> None:
        """Send an open round to all workers, each with the tasks of its devices.

        ``aggregation`` has the settings of the sums. Does nothing without workers.
        """
        if not self._slots:
            return
        self._spec = replace(aggregation.spec, threads=max(1, cores() // len(self._slots)))
        if len(opened.assignments) < len(self._slots) and not self._has_noted_few:
            self._has_noted_few = True
            text = (
                f"there are {len(self._slots)} workers, and round {opened.number} has {len(opened.assignments)} devices: "
                "some have nothing to do"
            )
            self._reporter.emit(Noted(text=text))
        for slot in self._slots:
            self._send_round(slot, opened)

    def decline(self, device: str) -> None:
        """Send the worker of ``device`` the information that the device declined its task."""
        if self._slots:
            self._slot_of(device).send(messages.DeviceDeclined(device))

    def end_round(self, ended: OpenRound, aggregation: RoundAggregation, *, summed: bool) -> OpenRound:
        """Close a round in the journal, collect the workers' sums, and add them to those of ``aggregation``.

        The updates of a worker whose sum is missing or differs from the journal are summed here.

        Args:
            ended: The round with the answers that the coordinator knows.
            aggregation: Sums of the round, changed in place.
            summed: False for an abandoned round, whose sums are not needed.

        Returns:
            The round with all answers in the journal.
        """
        self._spec = None
        if not self._slots:
            return ended
        accepted = self._journal.stop_taking(self._settings.rules.run, ended.number)
        sums = self._collect(ended.number, summed=summed)
        for slot in self._slots if summed else ():
            rows = {device: sha256 for device, (shard, sha256) in accepted.items() if shard in slot.shards}
            found = sums.get(slot.number)
            if found is not None and found.digest == messages.digest(rows):
                part = found.partial
            else:
                part = self._journal.policy.run(partial(self._sum_here, aggregation.spec, slot.shards))
            if part is not None:
                aggregation.aggregator.take(part)
        tasks = ended.assignments
        for device in accepted:
            tasks = tasks.with_answer(device, "accepted")
        return replace(ended, assignments=tasks)

    def _collect(self, number: int, *, summed: bool) -> dict[int, messages.RoundSum]:
        """Return the sums of round ``number`` by worker number. Workers that died or took longer than 120 s are
        missing.

        Workers that took too long are replaced. ``summed``: request the sums.
        """
        waiting = {slot.number: slot for slot in self._slots if slot.handle is not None}
        for slot in waiting.values():
            slot.send(messages.EndRound(number, summed))
        sums: dict[int, messages.RoundSum] = {}
        until = time.monotonic() + _SUM_S
        while waiting:
            try:
                tagged = self._sums.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                for slot in waiting.values():
                    self._replace(slot, f"gave no sum within {_SUM_S:g} s")
                break
            message = tagged.message
            if tagged.generation != self._slots[tagged.worker].generation:
                continue
            if isinstance(message, messages.RoundSum):
                if message.round != number:
                    continue
                sums[tagged.worker] = message
            waiting.pop(tagged.worker, None)
        return sums

    def _sum_here(self, spec: RoundAggregationSpec, shards: range) -> PartialSum | None:
        """Sum the accepted updates of ``shards`` from the journal in this process. Return None if there are none.

        The event of each update is emitted again, because the worker may not have sent it.
        """
        aggregation = spec.build()
        for event, checked, share in stored_updates(
            self._journal.direct, self._settings.rules.run, aggregation, shards
        ):
            self._reporter.emit(event)
            aggregation.aggregator.add(checked, event.weight, share)
        return aggregation.aggregator.partial()

    def _send_round(self, slot: _Slot, opened: OpenRound) -> None:
        if self._spec is None or slot.handle is None:
            return
        tasks = {device: task for device, task in opened.assignments.items() if self._slot_of(device) is slot}
        keys = {device: self._keys(device) for device in tasks}
        self._sent_keys |= keys
        part = replace(opened, assignments=Assignments(tasks), goal=max(1, len(tasks)))
        slot.send(messages.BeginRound(part, self._spec, keys))

    def _keys(self, device: str) -> tuple[DeviceKey, ...]:
        return self._journal.policy.run(lambda: tuple(self._registry.keys(device)))

    # -- messages of workers ---------------------------------------------------------------------------------

    def handle(self, tagged: messages.FromWorker, state: State) -> HandlerResult:
        """Handle a worker's message.

        Args:
            tagged: The message, from the inbox.
            state: State of the coordinator.

        Returns:
            Replies for devices, events for the coordinator, and tasks to send again.
        """
        slot = self._slots[tagged.worker]
        if tagged.generation != slot.generation:
            return NOTHING
        match tagged.message:
            case messages.Ready(number):
                slot.ready_round, slot.is_stalled = number, False
                current = state.round
                is_current = current is not None and current.number == number
                tasks = current.with_status("open") if current is not None and is_current else ()
                own = tuple(task for task in tasks if self._slot_of(task.device) is slot)
                return HandlerResult(events=self._end_outage(), tasks=own)
            case messages.UpdatesHandled() as progressed:
                for event in progressed.events:
                    self._reporter.emit(event)
                is_current = state.round is not None and state.round.number == progressed.round
                answers = (Answers(progressed.answers),) if progressed.answers and is_current else ()
                return HandlerResult(progressed.replies, answers)
            case messages.KeyRequest(device):
                keys = self._keys(device) if device in state.devices else None
                slot.send(messages.UpdateKeys({device: keys}))
            case messages.StorageFailed(text):
                self._stall(slot, StoreError(text))
            case messages.RefusedCounts(counts):
                slot.counts = counts
            case Died(reason):
                self._replace(slot, reason)
        return NOTHING

    def _end_outage(self) -> tuple[Outage, ...]:
        """Return an Outage event with the time since the first worker stalled, if none is stalled any more; else no
        event.
        """
        if self._stalled_since is None or self.is_stalled:
            return ()
        since, self._stalled_since = self._stalled_since, None
        return (Outage(self._clock() - since),)

    def _stall(self, slot: _Slot, error: StoreError) -> None:
        """Mark a worker as stalled because of a storage error, and report the error.

        It receives nothing until it reports that it is ready again.
        """
        slot.is_stalled = True
        if self._stalled_since is None:
            self._stalled_since = self._clock()
        self._reporter.report_storage_error(error)

    def _replace(self, slot: _Slot, reason: str) -> None:
        """Kill a worker that has failed, warn with ``reason``, and schedule the launch of its successor. Does nothing
        if it is gone.
        """
        if slot.handle is None:
            return
        slot.handle.kill()
        slot.handle, slot.ready_round = None, 0
        now = self._clock()
        is_stable = now - slot.launched_at >= _MAX_PAUSE_S
        slot.pause_s = _FIRST_PAUSE_S if is_stable else min(2 * slot.pause_s, _MAX_PAUSE_S)
        slot.launch_at = now + slot.pause_s
        text = f"worker {slot.number} {reason}; another one takes up what the journal has of its devices"
        self._reporter.emit(Warned(tier="", text=text))

    # -- periodic work ---------------------------------------------------------------------------------------

    def step(self, state: State, now: float) -> float | None:
        """Start missing workers, and send keys that changed.

        Args:
            state: State of the coordinator.
            now: Epoch seconds.

        Returns:
            Seconds until the next call; None if no call is needed.
        """
        if not self._slots:
            return None
        for slot in self._slots:
            if slot.launch_at is not None and slot.launch_at <= now:
                self._launch(slot, state.round, now)
        if self._spec is not None and now >= self._compare_keys_at + _KEYS_S:
            self._compare_keys_at = now
            self._send_changed_keys(state.round)
        waits = [slot.launch_at - now for slot in self._slots if slot.launch_at is not None]
        return max(0.0, min([_KEYS_S, *waits]))

    def _launch(self, slot: _Slot, current: OpenRound | None, now: float) -> None:
        slot.generation, slot.launched_at, slot.launch_at = slot.generation + 1, now, None
        settings = replace(self._settings, worker=slot.number)
        try:
            slot.handle = self._launcher.launch(settings, _SlotSink(slot, self._sums, self._inbox))
        except StoreError as error:
            self._stall(slot, error)
            slot.pause_s = min(2 * slot.pause_s, _MAX_PAUSE_S)
            slot.launch_at = now + slot.pause_s
            return
        if current is not None:  # the worker is ready once it has the round
            self._send_round(slot, current)
        else:  # no deadline runs between rounds, so the outage is not reported
            slot.is_stalled = False
            self._end_outage()

    def _send_changed_keys(self, current: OpenRound | None) -> None:
        changed: dict[int, dict[str, tuple[DeviceKey, ...] | None]] = {}
        for device in current.assignments.open if current is not None else ():
            keys = self._keys(device)
            if _validity(keys) != _validity(self._sent_keys.get(device, ())):
                self._sent_keys[device] = keys
                changed.setdefault(self._slot_of(device).number, {})[device] = keys
        for number, of_slot in changed.items():
            self._slots[number].send(messages.UpdateKeys(of_slot))

    def _slot_of(self, device: str) -> _Slot:
        return self._slots[worker_of(device, len(self._slots))]


def _validity(keys: tuple[DeviceKey, ...]) -> list[tuple[bytes, str, int]]:
    """Return (key, state, end of validity) of each key: the fields that decide whether a worker accepts its
    signatures.
    """
    return [(each.key, each.state, each.until) for each in keys]


def _share(limits: Limits, workers: int) -> Limits:
    """Return the limits of one of ``workers`` workers: their memory is divided, so that all hold as much as one server
    would.
    """
    return msgspec.structs.replace(
        limits,
        asked_bytes=max(1, limits.asked_bytes // workers),
        max_pending_bytes=max(1, limits.max_pending_bytes // workers),
        inbox_bytes=max(1, limits.inbox_bytes // workers),
    )

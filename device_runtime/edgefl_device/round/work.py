"""The work on one round: fetch its bundle, train, and put the update into the outbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from edgefl.errors import ProtocolError, RoundDeclined, StoreError
from edgefl.system.sizes import mebibytes
from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import Graph, Manifest, decode_manifest
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import CRASHED, NO_FORMAT, NO_MEMORY, TOO_MUCH, Profile, Update, update_pieces
from edgefl_device.data.samples import LabelSpec, Local
from edgefl_device.engine.base import Engine
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import ServerTrust
from edgefl_device.policy import Rules
from edgefl_device.round import bounds
from edgefl_device.round.costs import Profiler
from edgefl_device.round.graphs import GraphSettings, Step
from edgefl_device.round.job import Job
from edgefl_device.round.parts import parts_of
from edgefl_device.round.resume import Tell, carry_name, take_up
from edgefl_device.round.runner import RoundResult, RoundRunner
from edgefl_device.round.tuning import Forms, SuitedForms, Tuning
from edgefl_device.store.database import Outgoing, Store

# Between the steps of a round: whether it goes on, and how long it rests.

_ASK_S = 5.0
"""How often the owner's rules are asked: they may start a command."""
_SLICE_S = 0.1


@dataclass
class Guard:
    """One for a round. ``allowed`` raises RoundDeclined where the owner's rules do not let it go on; ``duty`` is the share
    of the time in which steps are made; ``aborted`` ends a rest."""

    limits: Limits
    allowed: Callable[[], None] = lambda: None
    duty: float = 1.0
    aborted: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _began: float = field(init=False)
    _asked: float = field(init=False)
    _worked_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._began = self._asked = self.clock()

    def worked(self, ms: float) -> None:
        """A step took so many milliseconds."""
        self._worked_s = ms / 1e3

    def between_steps(self) -> None:
        """RoundDeclined if the last step, or the round, took too long, or the owner's rules forbid the next."""
        now, took = self.clock(), self._worked_s
        self._worked_s = 0.0
        if took > self.limits.max_step_s:
            raise _too_long(f"a step took {took:.0f} s", f"limits.max_step_s is {self.limits.max_step_s:g}")
        if now - self._began > self.limits.max_round_s:
            raise _too_long(
                f"the round took {now - self._began:.0f} s",
                f"limits.max_round_s is {self.limits.max_round_s:g}",
            )
        if now - self._asked >= _ASK_S:
            self.allowed()
            self._asked = now
        self._rest(took)

    def _rest(self, worked_s: float) -> None:
        until = self.clock() + worked_s * (1.0 / self.duty - 1.0)
        while (left := until - self.clock()) > 0 and not self.aborted():
            self.sleep(min(left, _SLICE_S))


def _too_long(what: str, limit: str) -> RoundDeclined:
    return RoundDeclined(
        TOO_MUCH, f"{what}, and {limit} here: raise it, or give this device a smaller tier or fewer steps"
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a device works with. ``trust``: whose bundles are loaded. ``memory_bytes``: what a
    round may need over the idle process.

    ``tune``: as in :class:`edgefl_device.config.AgentConfig`, for an engine of so many ``threads``.
    ``begins`` is told the rows and steps of a round before the first of them, and which rows were left out, ``watch`` each
    step; ``aborted`` is asked
    before each step whether the round is over, ``dropped`` is told what was kept of earlier rounds and is of no use any
    more. ``rules`` are the owner's.
    """

    device: str
    folder: Path
    limits: Limits
    trust: ServerTrust
    memory_bytes: int
    threads: int
    tune: bool | None
    engine: Engine
    data: Local
    fetcher: Fetcher
    store: Store
    begins: Callable[[Job, int, int, str], None]
    watch: Callable[[Job, Step], None]
    aborted: Callable[[], bool]
    dropped: Tell
    rules: Rules

    def run(self, job: Job) -> str:
        """One round, from the first blob to the outbox.

        Returns:
            A line for people if the round took more memory than planned, which the server learns from the update.

        Raises RoundAborted when the round is over, RoundDeclined if this device cannot take part in it, DataError if
        the local data do not fit the model, and other EdgeflErrors after which the round may be tried again.
        """
        profiler = Profiler(self.engine)
        self.rules.check("train")
        self._check_tries(job)
        self._check_offered(job)
        bounds.check_manifest_ref(job.bundle, self.limits)
        self.trust.check_bundle(job.bundle.sha256, job.signature, job.format)
        manifest = decode_manifest(self.fetcher.get(job.bundle))
        self._check_formats(manifest)
        bounds.check_runtime(manifest, self.engine)
        self.check_memory(manifest, manifest.of_round)
        bounds.check_weights(job, manifest)
        parts = parts_of(self.engine, manifest, self.fetcher)
        data = self.data.fitted(manifest.data, LabelSpec.of(manifest), parts)
        start = take_up(self.store, job, manifest, self.dropped)
        rows = len(data.first(job.samples))
        bounds.check_work(manifest, rows, self.limits)
        self.begins(job, rows, sum(manifest.steps_with(rows)), str(data.skipped))
        runner = RoundRunner(
            engine=self.engine,
            manifest=manifest,
            blobs=self.fetcher,
            memory=self.store,
            profiler=profiler,
            settings=self._settings(job),
        )
        result = runner.run(job, data, start.arrays, start.origin)
        self._hand_over(job, manifest, result, self._profile(profiler, runner.graphs.forms))
        used, planned = profiler.most_bytes - profiler.idle_bytes, manifest.planned_bytes
        if not planned or used <= planned:
            return ""
        return (
            f"round {job.round} took {mebibytes(used)}, tier {job.tier!r} is planned at {mebibytes(planned)}; offer less "
            "memory to get a smaller tier"
        )

    def _check_tries(self, job: Job) -> None:
        if job.tries > self.limits.attempts:
            raise RoundDeclined(
                CRASHED,
                f"the work on round {job.round} was begun {self.limits.attempts} times (limits.attempts), and each time its "
                "process ended: this device leaves it",
            )

    def _check_offered(self, job: Job) -> None:
        if job.format != self.engine.format:
            raise RoundDeclined(
                NO_FORMAT,
                f"tier {job.tier!r} is offered in format {job.format}, and this device's engine runs {self.engine.format}: "
                f'have the server export that too (formats = ["{job.format}", "{self.engine.format}"] in [export]), or '
                "start the device with another `engine`",
                offered=job.format,
                format=self.engine.format,
            )

    def _check_formats(self, manifest: Manifest) -> None:
        wrong = {graph.format for graph in manifest.graphs} - {self.engine.format}
        if wrong:
            raise ProtocolError(
                f"the bundle holds {sorted(wrong)} graphs, this device runs {self.engine.format}"
            )

    def check_memory(self, manifest: Manifest, graphs: Sequence[Graph]) -> None:
        """RoundDeclined if one of ``graphs`` is known to need more than this device offers: before any is loaded."""
        bounds.check_graphs(manifest, graphs, self.memory_bytes)
        largest = max(graphs, key=lambda graph: graph.planned_bytes)
        if largest.planned_bytes > self.memory_bytes:
            raise RoundDeclined(
                NO_MEMORY,
                f"graph {largest.name!r} of tier {manifest.tier!r} needs {mebibytes(largest.planned_bytes)}, and this "
                f"device offers {mebibytes(self.memory_bytes)}: give it more (`edgefl device --memory`), or a tier that "
                "needs less: its `memory_bytes` in the federation's file keeps smaller devices out",
                needs_bytes=largest.planned_bytes,
                offers_bytes=self.memory_bytes,
            )

    def _settings(self, job: Job) -> GraphSettings:
        allowed = partial(self.rules.check, "train")
        guard = Guard(self.limits, allowed, self.rules.policy.duty, self.aborted)
        tuning, most = Tuning if self.tune else SuitedForms, self.limits.max_blob_bytes
        return GraphSettings(
            folder=self.folder,
            checkpoint_steps=self.limits.checkpoint_steps,
            watch=lambda step: self.watch(job, step),
            aborted=self.aborted,
            tuning=None if self.tune is False else tuning(self.store, self.memory_bytes, most),
            room=self._room,
            between=guard.between_steps,
            worked=guard.worked,
        )

    def _room(self, nbytes: int) -> None:
        try:
            self.store.make_room_beside(nbytes)
        except StoreError as error:
            raise RoundDeclined(TOO_MUCH, error.message, **error.details) from error

    def _profile(self, profiler: Profiler, forms: Forms) -> Profile:
        received = self.fetcher.take_received()
        return Profile(
            step_ms=profiler.median_ms("step"),
            forward_ms=profiler.total_ms("forward"),
            load_ms=profiler.total_ms("load"),
            idle_bytes=profiler.idle_bytes,
            peak_bytes=profiler.most_bytes,
            down_bytes=received.payload,
            down_wire_bytes=received.wire,
            variants=forms.used,
            dropped=forms.dropped,
            mirror_bytes=self.fetcher.mirrors.take_received(),
        )

    def _hand_over(self, job: Job, manifest: Manifest, result: RoundResult, profile: Profile) -> None:
        update = Update(
            run=job.run,
            round=job.round,
            device=self.device,
            nonce=job.nonce,
            tier=job.tier,
            model_version=job.model_version,
            samples=result.samples,
            metrics=result.metrics,
            profile=profile,
            codec=manifest.codec,
            codec_version=manifest.codec_version,
            tensors=b"",
        )
        # In pieces: the update is as large as what was trained, and joined it would be here three times.
        data = update_pieces(update, tensors.pieces(result.update, result.masks))
        carry = tensors.pieces(result.carry) if result.carry else None
        outgoing = Outgoing(job.run, job.round, job.nonce, ask=job.ask, shard=job.shard)
        self.store.finish_job(outgoing, carry, carry_name(job, manifest), data)

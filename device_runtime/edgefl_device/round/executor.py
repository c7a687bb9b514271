"""Execution of one round: download and check the bundle, train on the local data, store the update in the outbox.

A server without a trusted key declares every size. Before anything is downloaded, decompressed or loaded, sizes are checked
in two steps. The decompressed size of a blob is compared with the ports of the graphs that read it. The ports are compared
with the memory that the device offers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from edgefl.errors import BundleError, ProtocolError, RoundDeclined
from edgefl.system.sizes import mebibytes, size
from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import is_older
from edgefl.wire.bundle.manifest import Graph, Manifest, Port, decode_manifest
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import (
    CRASHED,
    NO_FORMAT,
    NO_MEMORY,
    TOO_MUCH,
    ResourceUsage,
    Round,
    Update,
    update_pieces,
)
from edgefl.wire.tensors import Array
from edgefl_device.config import AgentConfig, DeviceLog
from edgefl_device.data.samples import LocalSource, fit_rows
from edgefl_device.engine.base import Engine
from edgefl_device.link.fetch import Fetcher
from edgefl_device.link.identity import ServerTrust
from edgefl_device.policy import ROUND_WORK, OwnerRules, work_of
from edgefl_device.round.autotune import Autotuner, ProcessorTable
from edgefl_device.round.carry import carry_name, restore_carry
from edgefl_device.round.control import RoundControl
from edgefl_device.round.graph_loader import BlobSource, GraphLoader, RoundProfiler, check_port
from edgefl_device.round.job import Job
from edgefl_device.round.trainer import LocalTrainer, RoundResult
from edgefl_device.store.database import Outgoing, Store

_LEAST_BYTES = 32 << 20
"""Memory that any device is trusted to have: small offers are about a graph's own memory, and blobs have headers."""
_SLACK = 2
"""Factor by which a unit's blob may exceed what one graph reads: moving statistics, and weights of other tiers."""


class RoundExecutor:
    """Executor of a device's rounds, one at a time, on the thread of the round.

    Args:
        config: The device's configuration; ``memory_bytes`` is what a round may need above the idle process.
        engine: Engine that runs the graphs.
        data: The local samples.
        fetcher: Source of bundles and weights.
        store: Storage of checkpoints, of state for later rounds (carries) and of updates.
        trust: Keys of the server whose bundles are loaded.
        rules: The owner's rules.
        log: Receiver of events.
    """

    def __init__(
        self,
        config: AgentConfig,
        engine: Engine,
        data: LocalSource,
        fetcher: Fetcher,
        store: Store,
        trust: ServerTrust,
        rules: OwnerRules,
        log: DeviceLog,
    ) -> None:
        self.config = config
        self.engine = engine
        self.store = store
        self.trust = trust
        self.rules = rules
        self.log = log
        self._data = data
        self._fetcher = fetcher
        self.tuner: Autotuner | None = None
        if config.tune is not False:
            tuner = Autotuner if config.tune else ProcessorTable
            self.tuner = tuner(store, config.memory_bytes, config.limits.max_blob_bytes)

    def execute(self, job: Job, control: RoundControl) -> None:
        """Run one round, from the first download until the update is in the outbox.

        Args:
            job: The task, and the announcement's part for its tier.
            control: Cancels the round, and receives its steps.

        Raises:
            RoundAborted: The round was cancelled.
            RoundDeclined: This device cannot take part in the round.
            DataError: The local data do not fit the model.
            EdgeflError: The attempt failed; the round may be tried again.
        """
        profiler, limits = RoundProfiler(self.engine), self.config.limits

        # -- Checks that need no bundle.
        self.rules.check(*ROUND_WORK)
        if job.tries > limits.attempts:
            raise RoundDeclined(
                CRASHED,
                f"the work on round {job.round} was begun {limits.attempts} times (limits.attempts), and each time its "
                "process ended: this device leaves it",
            )
        if job.format != self.engine.format:
            raise RoundDeclined(
                NO_FORMAT,
                f"tier {job.tier!r} is offered in format {job.format}, and this device's engine runs {self.engine.format}: "
                f'have the server export that too (formats = ["{job.format}", "{self.engine.format}"] in [export]), or '
                "start the device with another `engine`",
                offered=job.format,
                format=self.engine.format,
            )

        # -- The manifest: who signed it, and whether this device can run what it lists.
        check_manifest_ref(job.bundle, limits)
        self.trust.check_bundle(job.bundle.sha256, job.signature, job.format)
        manifest = decode_manifest(self._fetcher.get(job.bundle))
        wrong = {graph.format for graph in manifest.graphs} - {self.engine.format}
        if wrong:
            raise ProtocolError(
                f"the bundle holds {sorted(wrong)} graphs, this device runs {self.engine.format}"
            )
        work = work_of(manifest.exchange)
        self.rules.check(work)
        control.work = work
        check_runtime(manifest, self.engine)
        self.check_memory(manifest, manifest.of_round)
        check_weights(job, manifest)

        # -- Data and carry.
        data = fit_rows(self._data, manifest, LoadedBundleParts(self.engine, manifest, self._fetcher))
        carry = restore_carry(self.store, job, manifest, self.log)
        rows = len(data.first(job.samples))
        steps = sum(manifest.steps_with(rows))
        if steps > limits.max_steps:
            raise RoundDeclined(
                TOO_MUCH,
                f"the round has {steps} local steps, and this device makes {limits.max_steps} at most: raise "
                "limits.max_steps, or have the server ask for fewer",
                steps=steps,
            )
        text = f"round {job.round} as {job.tier}: {rows} samples, {steps} steps"
        left_out = str(data.skipped)
        self.log.event("round", f"{text}; {left_out}" if left_out else text, round=job.round)

        # -- Training, and the update.
        loader = GraphLoader(self.engine, manifest, self._fetcher, profiler, self.tuner)
        trainer = LocalTrainer(loader, self.store, self.config.folder, limits.checkpoint_steps)
        result = trainer.train(job, data, carry.arrays, control, carry.origin)
        self._store_update(job, manifest, result, loader)
        used, planned = profiler.most_bytes - profiler.idle_bytes, manifest.planned_bytes
        if planned and used > planned:
            self.log.event(
                "memory",
                f"round {job.round} took {mebibytes(used)}, tier {job.tier!r} is planned at {mebibytes(planned)}; offer "
                "less memory to get a smaller tier",
            )

    def interrupt(self) -> None:
        """Prepare for the end of the process during a round, so that a running trial of a variant does not count as a
        crash.
        """
        if self.tuner is not None:
            self.tuner.interrupt()

    def check_memory(self, manifest: Manifest, graphs: Sequence[Graph]) -> None:
        """Check before loading that ``graphs`` need no more memory than this device offers.

        Raises:
            RoundDeclined: A graph needs more.
        """
        offered = self.config.memory_bytes
        check_graphs(manifest, graphs, offered)
        largest = max(graphs, key=lambda graph: graph.planned_bytes)
        if largest.planned_bytes > offered:
            raise RoundDeclined(
                NO_MEMORY,
                f"graph {largest.name!r} of tier {manifest.tier!r} needs {mebibytes(largest.planned_bytes)}, and this "
                f"device offers {mebibytes(offered)}: give it more (`edgefl device --memory`), or a tier that "
                "needs less: its `memory_bytes` in the federation's file keeps smaller devices out",
                needs_bytes=largest.planned_bytes,
                offers_bytes=offered,
            )

    def _store_update(self, job: Job, manifest: Manifest, result: RoundResult, loader: GraphLoader) -> None:
        """Store the update in the outbox and the state for later rounds (carry), and close the job, in one transaction."""
        received, profiler = self._fetcher.take_received(), loader.profiler
        update = Update(
            run=job.run,
            round=job.round,
            device=self.config.device,
            nonce=job.nonce,
            tier=job.tier,
            model_version=job.model_version,
            samples=result.samples,
            metrics=result.metrics,
            profile=ResourceUsage(
                step_ms=profiler.median_ms("step"),
                forward_ms=profiler.total_ms("forward"),
                load_ms=profiler.total_ms("load"),
                idle_bytes=profiler.idle_bytes,
                peak_bytes=profiler.most_bytes,
                down_bytes=received.payload,
                down_wire_bytes=received.wire,
                variants=loader.variants.used,
                dropped=loader.variants.dropped,
                mirror_bytes=self._fetcher.mirrors.take_received(),
            ),
            codec=manifest.codec,
            codec_version=manifest.codec_version,
            tensors=b"",
        )
        # In pieces: the update is as large as what was trained, and joined it would be in memory three times.
        data = update_pieces(update, tensors.pieces(result.update, result.masks))
        carry = tensors.pieces(result.carry) if result.carry else None
        outgoing = Outgoing(job.run, job.round, job.nonce, ask=job.ask, shard=job.shard)
        self.store.finish_job(outgoing, carry, carry_name(job, manifest), data)


def with_page(announced: Round, blobs: BlobSource, limits: Limits) -> Round:
    """Return the announcement with all of its offers. A large announcement has them in a blob, the page, which is
    downloaded.

    Raises:
        BundleError: The page is larger than ``limits.max_manifest_bytes``, or cannot be downloaded.
    """
    page = announced.pages
    if page is None:
        return announced
    largest = max(page.size, page.raw)
    if largest > limits.max_manifest_bytes:
        raise BundleError(
            f"the page of the announcement of round {announced.round} has {size(largest)}, more than this device reads: "
            "raise limits.max_manifest_bytes, or have the server use larger chunks",
            size=largest,
            limit=limits.max_manifest_bytes,
        )
    return announced.whole(blobs.get(page))


class LoadedBundleParts:
    """Parts of a bundle that decode local files: its blobs, and its graphs with one input and one output.

    Args:
        engine: Engine that runs the graphs.
        manifest: The bundle's manifest.
        blobs: Source of its blobs.
    """

    def __init__(self, engine: Engine, manifest: Manifest, blobs: BlobSource) -> None:
        self._engine = engine
        self._manifest = manifest
        self._blobs = blobs

    def blob(self, ref: BlobRef) -> bytes:
        """Return the decompressed bytes of a blob."""
        return self._blobs.get(ref)

    def features(self, name: str) -> Callable[[Array], Array]:
        """Load graph ``name`` and return it as a function from array to array.

        Raises:
            BundleError: The graph has more than one input or output.
        """
        spec = self._manifest.graph(name)
        if len(spec.inputs) != 1 or len(spec.outputs) != 1:
            raise BundleError(
                f"graph {name!r} makes samples of files, so that it reads one array and gives one; export the bundle again"
            )
        (port,), (output,) = spec.inputs, spec.outputs
        loaded = self._engine.load(spec, self._blobs.get(spec.blob))

        def apply(rows: Array) -> Array:
            check_port(port, rows)
            return np.array(loaded.run({port.name: rows}, {}).arrays[output.name])  # memory of its own

        return apply


# -- limits of what a bundle may ask of a device ---------------------------------------------------------------


def check_manifest_ref(ref: BlobRef, limits: Limits) -> None:
    """Check the size of a manifest before it is downloaded.

    Raises:
        RoundDeclined: The manifest is larger than ``limits.max_manifest_bytes``.
    """
    _check_sizes([ref], limits.max_manifest_bytes, "its manifest", "raise limits.max_manifest_bytes")


def check_runtime(manifest: Manifest, engine: Engine) -> None:
    """Check that the engine's runtime is recent enough for the bundle.

    Raises:
        RoundDeclined: A graph needs a newer release.
    """
    least = manifest.least_runtime
    if least and is_older(engine.version, least):
        raise RoundDeclined(
            NO_FORMAT,
            f"expected {engine.name} {least} or newer for tier {manifest.tier!r}, found {engine.version}; install it by "
            f'`pip install "{engine.name}>={least}"`',
            least=least,
            found=engine.version,
        )


def check_graphs(manifest: Manifest, graphs: Sequence[Graph], memory_bytes: int) -> None:
    """Check the sizes that a manifest declares against the offered memory.

    Args:
        manifest: The bundle's manifest.
        graphs: Graphs that will run.
        memory_bytes: Memory that the device offers.

    Raises:
        RoundDeclined: A blob, or all inputs or all outputs of one graph, exceed ``memory_bytes``.
    """
    most = max(memory_bytes, _LEAST_BYTES)
    remedy = "give it more (`edgefl device --memory`), or a tier that needs less"
    _check_sizes(manifest.blobs, most, "a blob of the bundle", remedy)
    for graph in graphs:
        for verb, ports in (("reads", graph.inputs), ("gives", graph.outputs)):
            needed = sum(_nbytes(port) for port in ports)
            if needed > most:
                raise RoundDeclined(
                    NO_MEMORY,
                    f"graph {graph.name!r} {verb} {size(needed)} at once, and this device offers {size(memory_bytes)}: "
                    f"{remedy}",
                    needs_bytes=needed,
                    offers_bytes=memory_bytes,
                )


def check_weights(job: Job, manifest: Manifest) -> None:
    """Check the decompressed sizes of a round's weights before they are downloaded.

    Raises:
        RoundDeclined: A blob is larger than all weights that a graph of the round reads.
    """
    read = max(
        (sum(_nbytes(port) for port in graph.inputs_of("weights")) for graph in manifest.of_round), default=0
    )
    units = [*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units)]
    refs = [ref for unit in units for ref in job.line(unit)]
    remedy = "have the server publish what the bundle reads"
    _check_sizes(refs, _SLACK * read + (1 << 20), "a blob of weights", remedy)


def _check_sizes(refs: Iterable[BlobRef], most: int, name: str, remedy: str) -> None:
    for ref in refs:
        unfolded = max(ref.size, ref.raw)
        if unfolded > most:
            raise RoundDeclined(
                NO_MEMORY,
                f"{name} ({ref.sha256[:12]}) has {size(unfolded)} where at most {size(most)} are of use: {remedy}",
                needs_bytes=unfolded,
            )


def _nbytes(port: Port) -> int:
    """Return the bytes of a port exactly, even for shapes that are too large for an array."""
    return int(np.dtype(port.dtype).itemsize) * math.prod(port.shape)

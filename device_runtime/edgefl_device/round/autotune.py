"""Choice of the variant of a graph that runs on this device, and of its number of threads.

A step is tried when a round first needs it, on the current batch and state. :class:`ProcessorTable` chooses the
variant that suits the processor, and runs it once to compare its outputs with those of the graph's own form.
:class:`Autotuner` runs every variant, drops those that fail or compute something else, and times the others. It also
times the fastest one with fewer threads. The result is stored by variants, engine, number of threads and processor,
so that no later round tries again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from edgefl.errors import BundleError, RoundAborted, StoreError
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.manifest import Graph
from edgefl.wire.bundle.variants import decompress, differ
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import MALFORMED
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.engine.base import Engine, State
from edgefl_device.host import processor, processor_features, trim_memory
from edgefl_device.round.control import RoundControl

STEPS, MOST_STEPS, TRIAL_MS = 4, 12, 500.0
"""Timed steps of each form after the one whose outputs are compared: at least ``STEPS``, and of short steps more, until they
have taken ``TRIAL_MS`` or are ``MOST_STEPS``. The quickest counts."""
WORTH = 0.97
"""A variant is taken if it needs at most this share of the time of the graph's own form."""
STEADY = 1.1
"""Ratio of two times of the graph's own form, before and after the variants, from which the machine counts as changed
meanwhile (another clock, other work, other cores); all forms are timed again then."""
UNCLEAR = 0.93, 0.99
"""Shares of time between which nothing is decided yet: steps of a second or more are few, and their quickest varies by some
percent."""
QUICK_S = 10.0
"""Duration of a turn below which a second one follows: a machine may be slow for as long as one form is timed."""
TURNS = 3
"""Turns at most. The quickest steps of the turns in which the machine did not change count, or those of the last turn."""
THREADS_WORTH = 0.9
"""Share of a step's time to which more threads must bring it to be taken: they cost energy."""
MORE = 1.1
"""Memory that a variant may need, as a multiple of what the graph's own form is planned to need."""
COPIES = 5
"""Copies of the state that a trial holds beside a running step: before, after, of the own form, and for the comparison."""
KILLED = "it ended the process that tried it"
FAILS = "the engine cannot run it"
DIFFERS = "it gives other results"
"""Reasons that the server gets. Figures and an engine's messages may hold values of the data, and stay here."""

_PROCESSOR_TABLE: tuple[tuple[frozenset[str], tuple[str, ...], tuple[str, ...]], ...] = (
    (frozenset({"avx2", "fma"}), ("blocked, rows", "blocked", "rows"), ("blocked",)),
)
"""Instruction sets, and the variants of ONNX graphs for processors that have them, best first: for one thread, and for more.

A processor with AVX-512 has these sets, too, and AMX computes no float32: the variants are the same there. NEON has no
entry: onnxruntime has no kernels for the blocked layout there, and updates by rows were not measured."""


class TuningResult(msgspec.Struct, frozen=True, kw_only=True):
    """Stored result of trying the variants of one graph: other forms of it that compute the same at another speed.

    Attributes:
        variant: Name of the variant to run; "" for the graph's own form, which is no variant.
        ms: Quickest step of each form in milliseconds, the own form's under "".
        dropped: Variants that cannot run here, each with the reason.
        threads: Number of threads to run it with; 0 for the engine's own.
        threads_ms: Quickest step with each number of threads that was tried.
        suited: True if the processor's table chose, without a measurement.
    """

    variant: str = ""
    ms: dict[str, float] = {}
    dropped: dict[str, str] = {}
    threads: int = 0
    threads_ms: dict[int, float] = {}
    suited: bool = False


class TuningStore(Protocol):
    """Interface of a persistent storage of encoded tuning results."""

    def choice(self, key: str) -> bytes | None: ...

    def keep_choice(self, key: str, data: bytes) -> None: ...

    def drop_choice(self, key: str) -> None: ...


class MemoryTuningStore(dict[str, bytes]):
    """Storage of encoded tuning results in this process's memory."""

    def choice(self, key: str) -> bytes | None:
        """Return the encoded result under ``key``; None if there is none."""
        return self.get(key)

    def keep_choice(self, key: str, data: bytes) -> None:
        """Store ``data`` under ``key``."""
        self[key] = data

    def drop_choice(self, key: str) -> None:
        """Delete the result under ``key``."""
        self.pop(key, None)


class ArtifactSource(Protocol):
    """Interface that provides the bytes of graphs and variants."""

    def get(self, ref: BlobRef) -> bytes: ...


@dataclass(frozen=True, eq=False)
class TrialStep:
    """One training step on which variants are tried: a graph with its inputs. The trial does not change ``state``."""

    engine: Engine
    graph: Graph
    blobs: ArtifactSource
    feeds: Mapping[str, Array]
    state: State
    control: RoundControl = field(default_factory=RoundControl)

    def state_copy(self) -> Arrays:
        """Return a copy of the state that the graph reads."""
        read = {port.name: self.state[port.name] for port in self.graph.inputs_of("state")}
        return {name: np.array(array) for name, array in self.engine.read_state(read).items()}

    def run(self, model: bytes, before: Arrays, threads: int, timed: bool = True) -> tuple[Arrays, float]:
        """Run ``model`` from the state ``before``.

        Args:
            model: Bytes of the graph's own form or of a variant.
            before: State before the step, by port name.
            threads: Number of threads; 0: the engine's own.
            timed: False runs one step and measures nothing.

        Returns:
            The outputs of the first step, and the milliseconds of the quickest later step: 0 if not ``timed``.

        Raises:
            RoundAborted: The round was cancelled meanwhile.
        """
        loaded, state = self.engine.load(self.graph, model, threads), self.engine.write_state(before)
        outputs = loaded.run(self.feeds, state)
        first = {name: np.array(array) for name, array in self.engine.read_state(outputs.state).items()}
        first |= outputs.arrays
        state = {**state, **outputs.state}  # tensors that the step only reads stay
        times: list[float] = [] if timed else [0.0] * MOST_STEPS
        while len(times) < STEPS or (len(times) < MOST_STEPS and sum(times) < TRIAL_MS):
            self.control.check_cancelled()
            start = time.perf_counter()
            state = {**state, **loaded.run(self.feeds, state).state}
            times.append(1e3 * (time.perf_counter() - start))
        return first, round(min(times), 3)


class Autotuner:
    """Chooser of the fastest variant of a graph, by measuring the variants. It stores the results.

    Args:
        store: Storage of results.
        memory_bytes: Memory that a step may need above the idle process.
        limit_bytes: Largest decompressed size of a variant.
    """

    measures: ClassVar[bool] = True

    def __init__(
        self, store: TuningStore, memory_bytes: int = 0, limit_bytes: int = Limits().max_blob_bytes
    ) -> None:
        self._store = store
        self._memory_bytes = memory_bytes
        self.limit_bytes = limit_bytes
        self._trial_key: str | None = None

    # -- stored results --------------------------------------------------------------------------------------

    def key(self, engine: Engine, graph: Graph) -> str:
        """Return the store's key for a graph: digests of its variants (else of itself), engine with version, number of
        threads, and processor.
        """
        # The digests of the forms themselves: the graph travels compressed or not.
        forms = " ".join(variant.sha256 for variant in graph.variants) or graph.blob.sha256
        return f"{forms} {engine.name} {engine.version} {engine.thread_counts[-1]} {processor()}"

    def known(self, engine: Engine, graph: Graph) -> TuningResult | None:
        """Return the stored result for a graph.

        Return None if no result is stored, if another release stored it in another form, or if it was chosen without
        measuring and this tuner measures.
        """
        data = self._store.choice(self.key(engine, graph))
        try:
            result = None if data is None else msgspec.msgpack.decode(data, type=TuningResult)
        except MALFORMED:
            return None
        return None if result and result.suited and self.measures else result

    def keep(self, engine: Engine, graph: Graph, result: TuningResult) -> None:
        """Store ``result`` for this engine and the forms of ``graph``. It replaces the mark of a running trial
        (:meth:`_mark`).
        """
        self._store.keep_choice(self.key(engine, graph), msgspec.msgpack.encode(result))
        self._trial_key = None

    def interrupt(self) -> None:
        """Delete the stored mark of a running trial, so that the next process tries its variants again.

        Call it before the process ends normally. Safe from any thread.
        """
        key, self._trial_key = self._trial_key, None
        if key is not None:
            with suppress(StoreError):  # a full disk: the variants of this one graph stay untried
                self._store.drop_choice(key)

    @contextmanager
    def _mark(self, trial: TrialStep, names: Collection[str]) -> Iterator[None]:
        """While the body runs, store the variants ``names`` as KILLED, so that one that ends the process is not tried
        again.

        An exception does not end the process, so it deletes the mark.
        """
        mark = TuningResult(dropped=dict.fromkeys(names, KILLED), suited=not self.measures)
        self.keep(trial.engine, trial.graph, mark)
        self._trial_key = self.key(trial.engine, trial.graph)
        try:
            yield
        except BaseException:
            self.interrupt()
            raise

    # -- trials ----------------------------------------------------------------------------------------------

    def has_room(self, graph: Graph) -> bool:
        """Return True if a variant of the graph is known to fit into memory."""
        return graph.planned_bytes > 0 and MORE * graph.planned_bytes <= self._memory_bytes

    def has_room_for_trial(self, graph: Graph) -> bool:
        """Return True if a trial, with its copies of the state, is known to fit into memory."""
        state = sum(port.nbytes for port in graph.inputs_of("state"))
        return self.has_room(graph) and MORE * graph.planned_bytes + COPIES * state <= self._memory_bytes

    def choose(self, trial: TrialStep) -> TuningResult | None:
        """Choose a variant of a training step and a number of threads by measuring them, and store the result.

        Returns:
            The result; None, with nothing stored, if outputs of this step cannot show that a variant is wrong.

        Raises:
            RoundAborted: The round was cancelled meanwhile.
            EdgeflError: The graph's own form fails, or a variant cannot be downloaded.
        """
        result = self.fastest(trial, [variant.name for variant in trial.graph.variants])
        if result is None:
            return None
        self.keep(trial.engine, trial.graph, result)
        if len(trial.engine.thread_counts) > 1:
            result = self.with_threads(trial, result)
            self.keep(trial.engine, trial.graph, result)
        return result

    def fastest(self, trial: TrialStep, names: Collection[str] | None = None) -> TuningResult | None:
        """Run the variants ``names`` (None: all) from the same state with the most threads, and choose the fastest.

        Until the caller stores the result, the store has the mark of a running trial (:meth:`_mark`).

        Measurements repeat until the machine is as fast at the end as at the beginning and the gain is clearly worth it
        or not. A tuner that does not measure runs each form once, and takes the last variant with equal outputs.

        Returns:
            The result; None if the graph's own form leaves the state unchanged or not finite: such a step cannot verify
            other forms.
        """
        engine, graph, blobs, timed = trial.engine, trial.graph, trial.blobs, self.measures
        before = trial.state_copy()
        base = blobs.get(graph.blob)
        frames = [
            (variant, blobs.get(variant.blob))
            for variant in graph.variants
            if names is None or variant.name in names
        ]
        most = engine.thread_counts[-1]
        expected, own_ms = trial.run(base, before, most, timed)
        if not _is_conclusive(expected, before):
            return None
        dropped: dict[str, str] = {}
        steady: dict[str, float] = {}
        with self._mark(trial, [variant.name for variant, _ in frames]):
            for number in range(TURNS):
                turn, start = {"": own_ms}, time.monotonic()
                for variant, frame in frames:
                    if variant.name in dropped:
                        continue
                    try:
                        model = decompress(variant, frame, base=base, limit=self.limit_bytes)
                        outputs, turn[variant.name] = trial.run(model, before, most, timed)
                        problem = DIFFERS if differ(outputs, expected, before) else ""
                    except (MemoryError, RoundAborted):
                        raise
                    except Exception:  # an engine's own, where one of its kernels fails
                        # An engine whose process was ended with the round says nothing about the variant.
                        trial.control.check_cancelled()
                        problem = FAILS
                    if problem:
                        dropped[variant.name] = problem
                        turn.pop(variant.name, None)
                if not timed:
                    return TuningResult(variant=list(turn)[-1], dropped=dropped)
                if len(turn) == 1:
                    break
                own_ms = trial.run(base, before, most, timed)[1]
                if max(turn[""], own_ms) > STEADY * min(turn[""], own_ms):
                    continue
                turn[""] = min(turn[""], own_ms)
                steady = {name: min(each, steady.get(name, each)) for name, each in turn.items()}
                if is_clear(steady) and (number or time.monotonic() - start >= QUICK_S):
                    break
        ms = {name: each for name, each in (steady or turn).items() if name not in dropped}
        best = min(ms, key=ms.__getitem__)
        return TuningResult(variant=best if ms[best] <= WORTH * ms[""] else "", ms=ms, dropped=dropped)

    def with_threads(self, trial: TrialStep, result: TuningResult) -> TuningResult:
        """Measure the variant of ``result`` with each number of threads, and return ``result`` with the best one.

        Numbers with which it fails are left out.
        """
        graph, blobs = trial.graph, trial.blobs
        model = base = blobs.get(graph.blob)
        for variant in graph.variants:
            if variant.name == result.variant:
                model = decompress(variant, blobs.get(variant.blob), base=base, limit=self.limit_bytes)
        before = trial.state_copy()
        *fewer, most = trial.engine.thread_counts
        ms = {most: result.ms[result.variant]}
        for count in fewer:
            try:
                ms[count] = trial.run(model, before, count)[1]
            except Exception:  # an engine's own, where it has no room for more
                trial.control.check_cancelled()
        return msgspec.structs.replace(result, threads=sufficient_threads(ms), threads_ms=ms)


class ProcessorTable(Autotuner):
    """Chooser of the variant that suits the processor's instruction sets, without a measurement.

    Args:
        features: Instruction sets of the processor; None reads this machine's.
    """

    measures = False

    def __init__(
        self,
        store: TuningStore,
        memory_bytes: int = 0,
        limit_bytes: int = Limits().max_blob_bytes,
        features: frozenset[str] | None = None,
    ) -> None:
        super().__init__(store, memory_bytes, limit_bytes)
        self._features = processor_features() if features is None else features

    def choose(self, trial: TrialStep) -> TuningResult | None:
        """Choose a variant by instruction sets, run it once to compare its outputs, and store the result.

        Return None, with nothing stored, if the step cannot verify the variant.
        """
        graph, engine = trial.graph, trial.engine
        names = [variant.name for variant in graph.variants]
        name = suited_variant(graph.format, names, self._features, engine.thread_counts[-1])
        result = self.fastest(trial, [name]) if name else TuningResult()
        if result is not None:
            result = msgspec.structs.replace(result, suited=True)
            self.keep(engine, graph, result)
        return result


@dataclass
class GraphVariants:
    """Variants (other forms of a graph that compute the same) that run during a round.

    Attributes:
        engine: Engine that runs the graphs.
        blobs: Source of the bytes of graphs and variants.
        tuner: Chooses variants; None runs the graphs' own form.
        used: By graph name, the variant that runs; "" for the graph's own form. Graphs without variants are left out.
        dropped: By ``graph/variant``, the reason why it cannot run here.
    """

    engine: Engine
    blobs: ArtifactSource
    tuner: Autotuner | None = None
    used: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def artifact(self, graph: Graph) -> tuple[bytes, int]:
        """Return (bytes to load, threads) of the chosen variant of ``graph``, or of the graph itself. 0 threads: the
        engine's own number.
        """
        base = self.blobs.get(graph.blob)
        result = self.tuner.known(self.engine, graph) if self.tuner else None
        if result is None or self.tuner is None:
            return base, 0
        if not graph.variants:
            return base, result.threads
        self.used[graph.name] = ""
        reasons = (KILLED, FAILS, DIFFERS)  # an earlier release stored others
        self.dropped |= {
            f"{graph.name}/{name}": reason if reason in reasons else FAILS
            for name, reason in result.dropped.items()
        }
        chosen = next((variant for variant in graph.variants if variant.name == result.variant), None)
        if chosen is None or not self.tuner.has_room(graph):
            return base, result.threads
        frame = self.blobs.get(chosen.blob)
        try:
            model = decompress(chosen, frame, base=base, limit=self.tuner.limit_bytes)
        except BundleError:
            self.dropped[f"{graph.name}/{chosen.name}"] = FAILS
            return base, result.threads
        self.used[graph.name] = chosen.name
        return model, result.threads

    def tune(self, graph: Graph, feeds: Mapping[str, Array], state: State, control: RoundControl) -> None:
        """Choose and store a variant if the graph has several, none was chosen before and memory allows a trial.

        Args:
            graph: The graph of the step.
            feeds: Its inputs but state.
            state: Its state, which does not change.
            control: Cancels the trial with the round.
        """
        tuner = self.tuner
        if tuner is None or not tuner.has_room_for_trial(graph):
            return
        if not graph.variants and len(self.engine.thread_counts) == 1:
            return
        if tuner.known(self.engine, graph) is None:
            tuner.choose(TrialStep(self.engine, graph, self.blobs, feeds, state, control))
            trim_memory()


def suited_variant(format: str, names: Collection[str], features: frozenset[str], threads: int = 1) -> str:
    """Return the variant that suits a processor.

    Args:
        format: Format of the graph. ExecuTorch programs run in their own form: by rows they take as long.
        names: Names of the graph's variants.
        features: Instruction sets of the processor (:func:`edgefl_device.host.processor_features`).
        threads: Threads of the engine. Blocks of rows keep a step in the cache of one core, and cost time on several.

    Returns:
        One of ``names``; "" for the graph's own form.
    """
    for needed, alone, together in _PROCESSOR_TABLE:
        if format == "onnx" and needed <= features:
            return next((name for name in (alone if threads == 1 else together) if name in names), "")
    return ""


def is_clear(ms: Mapping[str, float]) -> bool:
    """Return True if the fastest variant is clearly faster or clearly slower than the graph's own form.

    Args:
        ms: Milliseconds by variant, the own form's under "".
    """
    least, most = UNCLEAR
    share = min(each for name, each in ms.items() if name) / ms[""]
    return not least < share < most


def sufficient_threads(ms: Mapping[int, float]) -> int:
    """Return the smallest number of threads beyond which a step hardly becomes faster.

    Args:
        ms: Milliseconds of a step by number of threads.
    """
    best, *more = sorted(ms)
    for count in more:
        if ms[count] <= THREADS_WORTH * ms[best]:
            best = count
    return best


def _is_conclusive(expected: Arrays, before: Arrays) -> bool:
    """Return True if a step can verify variants: its outputs ``expected`` are finite, and a matrix of the state
    ``before`` changed.
    """
    matrices = [name for name in before if name in expected and expected[name].ndim >= 2]
    finite = all(np.isfinite(array).all() for array in expected.values() if array.dtype.kind == "f")
    return finite and any(not np.array_equal(expected[name], before[name]) for name in matrices)

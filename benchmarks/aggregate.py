"""``python -m benchmarks aggregate``: updates per second of the server's aggregator, beside Flower's weighted average.

Both start from arrays in memory and end with the new model, in turns in one run. Flower has a process of its own, and may
have an environment of its own. Receiving, decompressing and decoding are in neither figure: Flower reads float32.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import torch
import typer

from benchmarks.coded_model import CODECS, CodedModel, sized
from benchmarks.machine import import_path
from benchmarks.options import Codecs, Json, ZooModel, check_choice, python_option, with_options
from benchmarks.peers import interpreter, peers
from benchmarks.repetition import StepWorker, ratio, running
from benchmarks.results import measured, report
from benchmarks.sign_kernel import measure_signs
from benchmarks.workers.flower_average import RESULT
from edgefl.cli.options import ModelOptions
from edgefl.cli.output import errors
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.federation_options import parse_options
from edgefl.system.memory import cores
from edgefl.system.processes import last_line
from edgefl.system.structs import filled
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import decode
from edgefl_server.aggregate.accumulator import Accumulator
from edgefl_server.aggregate.adders import CheckedArrays
from edgefl_server.aggregate.aggregator import Aggregator, accumulator, layout_of
from edgefl_server.aggregate.averaging import HolderMean
from edgefl_server.aggregate.scatter import TierBlocks, flatten

Device = Literal["cpu", "cuda"]
PER_BLOCK = 3
"""Number of our aggregations in a block with one of Flower's."""
_PARAMETERS = 10**9
"""Default of ``--on-device``."""
_SUM_BYTES = 8
"""Bytes of an entry's sum."""
COPIED_BYTES = 512 << 20
"""Size of one copy: far beyond the caches of any processor."""
_INSTALL = "`python -m benchmarks peer flower` makes an environment that has it"


@dataclass(frozen=True)
class AggregateSettings:
    """Options of the command. Raises ConfigError for a device that does not exist here."""

    model: ZooModel = "resnet18"
    parameters: Annotated[
        int, typer.Option(min=0, help="measure a perceptron of about so many parameters; 0: the model")
    ] = 0
    codec: Codecs = None
    clients: Annotated[int, typer.Option(min=1, help="updates of a round")] = 32
    threads: Annotated[int, typer.Option(min=0, help="threads that add updates up; 0: one per core")] = 0
    device: Annotated[Device, typer.Option("--processor", help="where the sums are")] = "cpu"
    on_device: Annotated[
        bool,
        typer.Option(
            "--on-device", help="one-bit updates that are made in the GPU's memory: its kernel alone"
        ),
    ] = False
    repeat: Annotated[
        int, typer.Option(min=1, help="blocks, each with one average of Flower's and three of ours")
    ] = 5
    flower: Annotated[
        str,
        python_option(
            "interpreter of an environment with flwr; default: the one of `python -m benchmarks peer`"
        ),
    ] = ""
    option: ModelOptions = None
    as_json: Json = False

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "--processor cuda needs an NVIDIA GPU and a torch that can use it, and torch finds none here; choose cpu",
                device=self.device,
            )


class AggregateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over all blocks, and minima of times. Flower's columns are null where it did not run (``flower_error``).

    Attributes:
        seconds: time to add the updates as they travelled into the sums, in ``batches``.
        updates_per_s: ``clients / seconds``; ``ratio`` is that over ``flower_updates_per_s``, of Flower's whole average.
        round_s: time of a whole round: each update checked and added, and the new weights made.
        round_ratio: Flower's time over ``round_s``.
        counted_bytes: bytes of all updates, and of the sums, read and written once per batch.
        copy_fraction: ``counted_bytes / seconds`` over ``copy_bytes_per_s``, the best copy of the run on as many threads.
            A copied byte counts twice, too.
        difference: largest difference between an entry of our new weights and of Flower's.
    """

    codec: str
    device: str
    parameters: int
    clients: int
    updates_per_s: float
    flower_updates_per_s: float | None
    ratio: float | None
    copy_fraction: float
    round_updates_per_s: float
    round_ratio: float | None
    seconds: float
    seconds_min: float
    round_s: float
    round_s_min: float
    flower_s: float | None
    flower_s_min: float | None
    difference: float | None
    update_bytes: int
    counted_bytes: int
    batches: int
    copy_bytes_per_s: float
    threads: int
    repeat: int
    model: str
    tensors: int
    flower_error: str | None = None


class OnDeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the sums alone, all ``clients`` in one batch, with the fields of :class:`AggregateRow`.

    Flower cannot average on a GPU, so its fields are null.

    Attributes:
        gpu: name of the GPU.
        tunings: seconds of each way to launch the kernel; ``seconds`` belongs to the server's choice.
    """

    codec: str
    device: str
    parameters: int
    clients: int
    updates_per_s: float
    flower_updates_per_s: float | None
    ratio: float | None
    copy_fraction: float
    seconds: float
    update_bytes: int
    counted_bytes: int
    copy_bytes_per_s: float
    repeat: int
    gpu: str
    tunings: dict[str, float]


@with_options(AggregateSettings)
def aggregate(settings: AggregateSettings) -> None:
    """Updates per second of the server's aggregator, beside Flower's weighted average of the same updates as float32.

    Both start from arrays in memory, in turns: ours as they travelled, Flower's decoded before its clock starts.
    updates_per_s counts the time to add the updates into the sums, ratio compares it with Flower's whole average. A whole
    round of ours, in which each update is checked and added and the new weights are made, is round_updates_per_s and
    round_ratio.

    copy_fraction: bytes that accumulating has to move, per second, as a share of a plain copy on as many threads in the same
    run. They are each byte of each update once, and the int64 sums read and written once per batch; a copy of n bytes moves
    2 n. Times are medians; --json has the minima, too.

    With --processor cuda the sums are on the GPU, and the updates' way there is a part of the time; with --on-device they
    are made there, one bit per entry, and only the kernel's own time counts.

    Flower runs in a process and an environment of its own, which `python -m benchmarks peer flower` makes once. Without
    one its columns are empty, and nothing else changes.

    Examples:

      python -m benchmarks aggregate --json

      python -m benchmarks aggregate --codec fedbat --codec fedpaq:bits=2 --clients 64 --threads 4

      python -m benchmarks aggregate --processor cuda --on-device --parameters 1000000000 --clients 64
    """

    if settings.on_device:
        _on_device(settings)
        return
    check_choice([settings.model], settings.option or (), codecs=settings.codec or ())
    flower = settings.flower or interpreter(peers()["flower"]) or ""
    settings = replace(settings, flower=flower)
    spec = build(settings.model, settings.parameters, parse_options(settings.option or ()))
    rows, failed = measured(
        settings.codec or CODECS, lambda codec, say: measure(spec, codec, settings, say), _aggregate_columns
    )
    for problem in sorted({row.flower_error for row in rows if row.flower_error}):
        errors.print(f"Flower did not run: {problem}", style="yellow")
    title = f"aggregate: {spec.name}, {settings.clients} clients, {settings.device}"
    report("aggregate", title, rows, _aggregate_columns, settings.as_json, failed)


def _aggregate_columns(row: AggregateRow) -> dict[str, Any]:
    return {
        "codec": row.codec,
        "updates/s": row.updates_per_s,
        "Flower": row.flower_updates_per_s,
        "ratio": row.ratio,
        "whole round": row.round_updates_per_s,
        "its ratio": row.round_ratio,
        "of a copy": f"{row.copy_fraction:.0%}",
    }


def _on_device(settings: AggregateSettings) -> None:
    if settings.device != "cuda":
        raise ConfigError(
            "--on-device measures a GPU's kernel on updates in its memory; add --processor cuda"
        )
    found = measure_signs(settings.parameters or _PARAMETERS, settings.clients, repeat=settings.repeat)
    row = on_device_row(found, settings.repeat)
    title = f"aggregate on {row.gpu}: {settings.clients} clients"
    report("aggregate", title, [row], _on_device_columns, settings.as_json)


def _on_device_columns(row: OnDeviceRow) -> dict[str, Any]:
    return {
        "codec": row.codec,
        "parameters": row.parameters,
        "ms": 1e3 * row.seconds,
        "updates/s": row.updates_per_s,
        "GB/s of a copy": row.copy_bytes_per_s / 1e9,
        "of a copy": f"{row.copy_fraction:.0%}",
    }


def on_device_row(found: Mapping[str, Any], repeat: int) -> OnDeviceRow:
    """Return the result of :func:`benchmarks.sign_kernel.measure_signs` as a row."""
    parameters, clients = found["parameters"], found["clients"]
    return OnDeviceRow(
        codec="fedbat",
        device="cuda",
        parameters=parameters,
        clients=clients,
        updates_per_s=round(found["updates_per_s"], 2),
        flower_updates_per_s=None,
        ratio=None,
        copy_fraction=round(found["copy_fraction"], 4),
        seconds=round(found["seconds"], 6),
        update_bytes=(found["bytes"] - 2 * _SUM_BYTES * parameters) // clients,
        counted_bytes=found["bytes"],
        copy_bytes_per_s=round(found["copy_bytes_per_s"]),
        repeat=repeat,
        gpu=found["device"],
        tunings=dict(found["tunings"]),
    )


def build(model: str, parameters: int, options: Mapping[str, Any]) -> ModelSpec:
    """Return the model whose updates are added, or a perceptron of so many ``parameters``. Raises ModelError."""
    return sized(parameters) if parameters else build_model(model, **options)


def measure(
    spec: ModelSpec, codec: str, settings: AggregateSettings, say: Callable[[str], None] = lambda _: None
) -> AggregateRow:
    """Measure one codec. Raises ConfigError or ModelError if the model cannot use it."""
    say(f"{codec}: drawing {settings.clients} updates")
    model = CodedModel.of(spec, codec)
    ours = AggregatorRun(model, clients=settings.clients, threads=settings.threads, device=settings.device)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-bench-")))
        flower, problem = _start_flower(stack, folder, ours, settings, say)
        say(f"{codec}: warming up")
        difference = ours.difference(folder / RESULT) if flower else None
        for block in range(1, settings.repeat + 1):
            say(f"{codec}: block {block} of {settings.repeat}")
            if flower:
                flower.run(1)
            ours.run(PER_BLOCK)
    flower_ms = flower.times if flower else []
    seconds, round_s = statistics.median(ours.seconds), statistics.median(ours.round_s)
    flower_s = statistics.median(flower_ms) / 1e3 if flower_ms else None
    return filled(
        AggregateRow,
        ours,
        settings,
        codec=ours.model.codec,
        parameters=ours.layout.size,
        updates_per_s=round(settings.clients / seconds, 2),
        flower_updates_per_s=round(settings.clients / flower_s, 2) if flower_s else None,
        ratio=ratio(flower_s, seconds, 3) if flower_s else None,
        copy_fraction=round(ours.counted_bytes / seconds / max(ours.copies), 4),
        round_updates_per_s=round(settings.clients / round_s, 2),
        round_ratio=ratio(flower_s, round_s, 3) if flower_s else None,
        seconds=round(seconds, 6),
        seconds_min=round(min(ours.seconds), 6),
        round_s=round(round_s, 6),
        round_s_min=round(min(ours.round_s), 6),
        flower_s=round(flower_s, 6) if flower_s else None,
        flower_s_min=round(min(flower_ms) / 1e3, 6) if flower_ms else None,
        difference=difference,
        copy_bytes_per_s=round(max(ours.copies)),
        model=ours.model.spec.name,
        tensors=len(ours.layout.shapes),
        flower_error=problem,
    )


def _start_flower(
    stack: contextlib.ExitStack,
    folder: Path,
    ours: AggregatorRun,
    settings: AggregateSettings,
    say: Callable[[str], None],
) -> tuple[StepWorker | None, str | None]:
    """Return the worker after a first average that is not counted, or None and the reason."""
    if not settings.flower:
        return None, f"--flower names no interpreter with flwr; {_INSTALL}"
    if problem := too_large(ours.layout.size, settings.clients, psutil.virtual_memory().available):
        return None, problem
    path = stack.enter_context(import_path())
    environment = {
        "PYTHONPATH": str(path),
        "OMP_NUM_THREADS": str(ours.threads),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    if missing := _import_problem(settings.flower, environment):
        return None, missing
    say(f"{ours.model.codec}: decoding for Flower")
    job = {"shapes": list(ours.layout.shapes.values()), "examples": ours.examples}
    (folder / "job.json").write_text(json.dumps(job))
    for number, update in enumerate(ours.updates):
        ours.decoded(update).tofile(folder / f"{number}.f32")
    worker = StepWorker(
        [settings.flower, "-m", "benchmarks.workers.flower_average", str(folder)], environment
    )
    stack.enter_context(running([worker], "Flower"))
    worker.run(1, count=False)
    return worker, None


def too_large(entries: int, clients: int, free: int) -> str | None:
    """Return why Flower cannot average so many updates in ``free`` bytes, or None: it holds all of them twice."""
    needed = 2 * 4 * entries * clients
    if needed <= free:
        return None
    return (
        f"it needs {needed / 2**30:.1f} GiB for the decoded updates and their weighted copies, and {free / 2**30:.1f} GiB "
        "are free; choose fewer --clients"
    )


def _import_problem(python: str, environment: Mapping[str, str]) -> str | None:
    """Return why Flower cannot run with this interpreter, or None. Called before gigabytes are written for it."""
    process = subprocess.run(
        [python, "-c", "from flwr.server.strategy.aggregate import aggregate"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode == 0:
        return None
    return f"{last_line(process.stderr, 'it ended without a word')}: it is not installed there; {_INSTALL}"


class AggregatorRun:
    """Random updates of ``clients`` devices, and the times to aggregate them.

    Attributes:
        examples: weight of each update.
        round_s: seconds of whole rounds.
        seconds: seconds of the sums alone.
        copies: bytes per second of the copies.
        batches: batches of the last sums.
    """

    def __init__(self, model: CodedModel, *, clients: int, threads: int, device: str) -> None:
        self.model = model
        self.threads = threads or cores()
        self.layout = layout_of(model.weights)
        self.examples = [100 + client for client in range(clients)]
        self.updates = [model.random_update(client) for client in range(clients)]
        self.update_bytes = sum(array.nbytes for array in self.updates[0].values())
        self._device = device
        self.round_s: list[float] = []
        self.seconds: list[float] = []
        self.copies: list[float] = []
        self.batches = 0
        self.aggregated()  # compiles what is not compiled yet
        self._accumulate()

    @property
    def counted_bytes(self) -> int:
        """Bytes of all updates, and of the sums, read and written once per batch."""
        return len(self.updates) * self.update_bytes + 2 * _SUM_BYTES * self.layout.size * self.batches

    def run(self, times: int) -> None:
        """Time so many aggregations, sums and copies, in turns."""
        for _ in range(times):
            start = time.perf_counter()
            self.aggregated()
            self.round_s.append(time.perf_counter() - start)
            self.seconds.append(self._accumulate())
            self.copies.append(self._copy.bytes_per_s())

    def aggregated(self) -> Arrays:
        """Return the new weights, computed as in a round of the server."""
        aggregator = self._aggregator()
        for update, examples in zip(self.updates, self.examples, strict=True):
            aggregator.add(aggregator.check(update, self.model.regions, self.model.form), examples)
        result = aggregator.result(self.model.weights)
        aggregator.release_sums()
        return result

    def decoded(self, update: Arrays) -> npt.NDArray[np.float32]:
        """Return an update as float32 in the order of the layout."""
        shapes = self.layout.shapes
        return flatten(self.layout, decode(self.model.form, update, self.model.regions, shapes)).astype(
            np.float32
        )

    def difference(self, average: Path) -> float:
        """Return the largest difference between our new weights and those of ``average``, a file of Flower's."""
        theirs = np.fromfile(average, np.float32)
        if self.model.form.change:
            theirs += flatten(self.layout, self.model.weights)
        return float(np.abs(flatten(self.layout, self.aggregated()) - theirs).max())

    def _aggregator(self) -> Aggregator:
        limit = sum(self.examples)
        return Aggregator(
            self.layout, weight_limit=limit, device=self._device, threads=self.threads, sums=self._sums
        )

    @cached_property
    def _sums(self) -> Accumulator:
        """Sums that all rounds share, like on a server."""
        return accumulator(self.layout.size, self._device, self.threads)

    @cached_property
    def _copy(self) -> CpuCopy | CudaCopy:
        return CudaCopy() if self._device == "cuda" else CpuCopy(self.threads)

    @cached_property
    def _checked(self) -> list[CheckedArrays]:
        aggregator = self._aggregator()
        return [aggregator.check(update, self.model.regions, self.model.form) for update in self.updates]

    def _accumulate(self) -> float:
        """Return the seconds of the sums alone, in the batches of the aggregator."""
        self._sums.reset()
        sums = _TimedAccumulator(self._sums, self._device)
        scale = 2.0 ** self._aggregator().fraction_bits
        average = HolderMean(self.layout, cast(Accumulator, sums), scale)
        for update, examples in zip(self._checked, self.examples, strict=True):
            average.add(update, examples, examples * scale)
        average.flush()
        self.batches = sums.batches
        return sums.seconds


class _TimedAccumulator:
    """Accumulator that measures the time of its additions."""

    def __init__(self, sums: Accumulator, device: str) -> None:
        self.seconds = 0.0
        self.batches = 0
        self._sums = sums
        self._cuda = device == "cuda"

    def add(
        self, pieces: TierBlocks, updates: Sequence[CheckedArrays], factors: npt.NDArray[np.float64]
    ) -> None:
        start = time.perf_counter()
        self._sums.add(pieces, updates, factors)
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.batches += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sums, name)


class CpuCopy:
    """Copy between two arrays of ``size`` bytes; each of ``threads`` threads copies a span of its own."""

    def __init__(self, threads: int, size: int = COPIED_BYTES) -> None:
        self.source, self.target = (
            np.ones(size, np.uint8),
            np.zeros(size, np.uint8),
        )  # written to, so really there
        self.target.fill(2)
        edges = np.linspace(0, size, threads + 1).astype(np.int64).tolist()
        self._spans = [slice(first, stop) for first, stop in pairwise(edges)]

    def bytes_per_s(self) -> float:
        """Return the speed of one copy. Its bytes count twice, once read and once written."""
        with ThreadPoolExecutor(len(self._spans)) as pool:
            start = time.perf_counter()
            list(pool.map(lambda span: np.copyto(self.target[span], self.source[span]), self._spans))
            return 2 * self.source.nbytes / (time.perf_counter() - start)


class CudaCopy:
    """Copy on the GPU, from its memory to its memory."""

    def __init__(self, size: int = COPIED_BYTES) -> None:
        self.source = torch.ones(size, dtype=torch.uint8, device="cuda")
        self.target = torch.empty_like(self.source)

    def bytes_per_s(self) -> float:
        """Return the speed of one copy. Its bytes count twice, once read and once written."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.target.copy_(self.source)
        torch.cuda.synchronize()
        return 2 * self.source.nbytes / (time.perf_counter() - start)

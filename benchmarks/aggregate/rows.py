"""Updates a second of the server's aggregator, beside Flower's weighted average of the same ones decoded.

Both start from arrays in memory and end with the new model, by turns in one run. Flower has a process of its own, and may
have an environment of its own. Receiving, decompressing and decoding are in neither figure: Flower is given float32.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from benchmarks.aggregate.flower import RESULT
from benchmarks.aggregate.ours import Ours
from benchmarks.common.coded import CODECS, CodedModel, sized
from benchmarks.common.machine import import_path, running
from benchmarks.common.worker import Worker
from edgefl.errors import ConfigError
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.system.processes import last_line
from edgefl.system.structs import filled
from edgefl_server.aggregate.cuda import measure_signs

__all__ = ["CODECS", "AggregateRow", "AggregateSettings", "build", "measure"]

PER_BLOCK = 3
"""Of our aggregations in a block with one of Flower's."""
_INSTALL = "`python -m benchmarks peer flower` makes an environment that has it"


class AggregateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over all blocks, and minima of times. Flower's columns are null where it did not run (``flower_error``).

    ``updates_per_s`` is ``clients / seconds``, and ``seconds`` what it takes to add the updates as they travelled into the
    sums, in ``batches``; ``ratio`` is to ``flower_updates_per_s``, of Flower's whole average. ``round_s`` is all of a
    round: every update checked, added, and the finished new weights made; ``round_ratio`` is Flower's time beside that.
    ``copy_fraction`` is ``counted_bytes`` per ``seconds`` in units of ``copy_bytes_per_s`` (the best copy of the run, on
    as many threads): ``counted_bytes`` is every byte of every update once, and the sums read and written once per batch;
    a copied byte counts twice, too. ``difference`` is the largest between an entry of our new weights and of Flower's.
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


@dataclass(frozen=True)
class AggregateSettings:
    """Settings of the benchmark. ``threads``: 0 is every core. ``flower``: the interpreter that Flower runs in, "" for none
    (:mod:`benchmarks.common.peers` makes one).

    Raises ConfigError for a device that is not there or an interpreter that does not exist.
    """

    clients: int = 32
    threads: int = 0
    device: str = "cpu"
    repeat: int = 5
    flower: str = ""

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "--processor cuda needs an NVIDIA GPU and a torch that can use it, and torch finds none here; choose cpu",
                device=self.device,
            )


def build(model: str, parameters: int, options: Mapping[str, Any]) -> ModelSpec:
    """The model whose updates are added, or with ``parameters`` a perceptron of that size; ModelError if there is none."""
    return sized(parameters) if parameters else build_model(model, **options)


def measure(
    spec: ModelSpec, codec: str, settings: AggregateSettings, say: Callable[[str], None] = lambda _: None
) -> AggregateRow:
    """One row. ConfigError or ModelError where there is no such codec."""
    say(f"{codec}: drawing {settings.clients} updates")
    model = CodedModel.of(spec, codec)
    ours = Ours(model, clients=settings.clients, threads=settings.threads, device=settings.device)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgefl-bench-")))
        flower, problem = _flower(stack, folder, ours, settings, say)
        say(f"{codec}: warming up")
        difference = ours.difference(folder / RESULT) if flower else None
        for block in range(1, settings.repeat + 1):
            say(f"{codec}: block {block} of {settings.repeat}")
            if flower:
                flower.run(1)
            ours.run(PER_BLOCK)
    return _row(ours, settings, flower.times if flower else [], difference, problem)


def _row(
    ours: Ours,
    settings: AggregateSettings,
    flower_ms: Sequence[float],
    difference: float | None,
    problem: str | None,
) -> AggregateRow:
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
        ratio=round(flower_s / seconds, 3) if flower_s else None,
        copy_fraction=round(ours.counted_bytes / seconds / max(ours.copies), 4),
        round_updates_per_s=round(settings.clients / round_s, 2),
        round_ratio=round(flower_s / round_s, 3) if flower_s else None,
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


# -- Flower's side ---------------------------------------------------------------------------------------------


def _flower(
    stack: contextlib.ExitStack,
    folder: Path,
    ours: Ours,
    settings: AggregateSettings,
    say: Callable[[str], None],
) -> tuple[Worker | None, str | None]:
    """The worker, after a first average that is not counted; or None and why."""
    if not settings.flower:
        return None, f"no interpreter of an environment with flwr was named; {_INSTALL}"
    if problem := too_large(ours.layout.size, settings.clients, psutil.virtual_memory().available):
        return None, problem
    path = stack.enter_context(import_path())
    environment = {
        "PYTHONPATH": str(path),
        "OMP_NUM_THREADS": str(ours.threads),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    if missing := _missing(settings.flower, environment):
        return None, missing
    say(f"{ours.model.codec}: decoding for Flower")
    job = {"shapes": list(ours.layout.shapes.values()), "examples": ours.examples}
    (folder / "job.json").write_text(json.dumps(job))
    for number, update in enumerate(ours.updates):
        ours.decoded(update).tofile(folder / f"{number}.f32")
    worker = Worker([settings.flower, "-m", "benchmarks.aggregate.flower", str(folder)], environment)
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


def _missing(python: str, environment: Mapping[str, str]) -> str | None:
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


ON_DEVICE_CODEC = "fedbat"
_BYTES = 8
"""Of a sum."""


class OnDeviceRow(msgspec.Struct, frozen=True, kw_only=True):
    """As :class:`benchmarks.aggregate.rows.AggregateRow`, of the sums alone, all ``clients`` in one batch; medians.

    Flower, which has no way to average on a GPU, has no part in it. ``gpu`` is its name, ``tunings`` the seconds of each
    way in which the kernel can be launched; ``seconds`` is that of the one the server uses.
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


def measure_on_device(parameters: int, clients: int, repeat: int) -> OnDeviceRow:
    """The row. ConfigError where there is no CUDA or no triton."""
    return row_of(measure_signs(parameters, clients, repeat=repeat), repeat)


def row_of(found: Mapping[str, Any], repeat: int) -> OnDeviceRow:
    """What :func:`edgefl_server.aggregate.cuda.measure_signs` found, as a row."""
    parameters, clients = found["parameters"], found["clients"]
    return OnDeviceRow(
        codec=ON_DEVICE_CODEC,
        device="cuda",
        parameters=parameters,
        clients=clients,
        updates_per_s=round(found["updates_per_s"], 2),
        flower_updates_per_s=None,
        ratio=None,
        copy_fraction=round(found["copy_fraction"], 4),
        seconds=round(found["seconds"], 6),
        update_bytes=(found["bytes"] - 2 * _BYTES * parameters) // clients,
        counted_bytes=found["bytes"],
        copy_bytes_per_s=round(found["copy_bytes_per_s"]),
        repeat=repeat,
        gpu=found["device"],
        tunings=dict(found["tunings"]),
    )

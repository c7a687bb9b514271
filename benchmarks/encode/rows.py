"""Cost of serializing an update on a device, beside one of its training steps.

Both run on the device's engine, from the graphs that a bundle would hold, each in a fresh process of its own; the
processes take turns in blocks of equally many calls, as in :mod:`benchmarks.common.machine`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from benchmarks.common.coded import CODECS, CodedModel
from benchmarks.common.device_graph import Exported, export, with_state, write_function
from benchmarks.common.machine import running, take_turns, worker_of
from benchmarks.common.worker import Worker
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import prefixed
from edgefl.models.spec import ModelSpec
from edgefl.system.structs import filled
from edgefl.wire.update.form import update_size

__all__ = ["CODECS", "EncodeRow", "EncodeSettings", "measure"]

SGD = "dense"
"""The codec whose local training is plain SGD."""
DEVICE = "benchmarks.encode.device"


class EncodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, medians (and minima) over all counted calls; ``ratio`` is ``encode_ms / step_ms``.

    ``encode_ms`` is all of the algorithm's ``finish``: its noise drawn, its graph run, its update made to bytes.
    ``step_ms`` is the last phase's step of the same algorithm (FedBAT's binarized one), its noise in, its batch ready;
    ``sgd_step_ms`` and ``sgd_ratio`` stand beside plain SGD instead. ``encode_first_ms`` is the first call in a new
    process, ``encode_load_s`` the time before it until the graph could be run. ``update_bytes`` is the update's length.
    """

    codec: str
    encode_ms: float
    step_ms: float
    ratio: float
    encode_ms_min: float
    step_ms_min: float
    sgd_step_ms: float
    sgd_ratio: float
    encode_first_ms: float
    encode_load_s: float
    update_bytes: int
    artifact_bytes: int
    algorithm: str
    model: str
    parameters: int
    batch: int
    threads: int
    calls: int


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of the benchmark: ``repeat`` blocks of calls to each graph."""

    batch: int = 32
    threads: int = 1
    repeat: int = 5


def measure(
    spec: ModelSpec, codec: str, settings: EncodeSettings, say: Callable[[str], None] = lambda _: None
) -> EncodeRow:
    """One row. ConfigError or ModelError where there is no such codec, ExportError where its graphs cannot be made."""
    model = CodedModel.of(spec, codec, batch=settings.batch)
    plain, sgd_step = _sgd(spec, settings.batch)
    own_step = model.algorithm.name != plain.algorithm.name
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as name:
        folder = Path(name)
        say(f"{codec}: exporting")
        artifact = write_graph(folder, "encode", model, model.algorithm.finish)
        write_graph(folder, "sgd", plain, _step(plain.algorithm), sgd_step)
        if own_step:
            write_graph(folder, "step", model, _step(model.algorithm))
        workers = {
            name: worker_of(DEVICE, folder, name, settings.threads, threads=settings.threads)
            for name in ("encode", "sgd", "step")
            if name != "step" or own_step
        }
        first_ms = _race(workers, settings, lambda text: say(f"{codec}: {text}"))
    encode, sgd = workers["encode"], workers["sgd"]
    step = workers.get("step", sgd)
    return filled(
        EncodeRow,
        settings,
        codec=codec,
        encode_ms=encode.median_ms,
        step_ms=step.median_ms,
        ratio=round(encode.median_ms / step.median_ms, 4),
        encode_ms_min=encode.fastest_ms,
        step_ms_min=step.fastest_ms,
        sgd_step_ms=sgd.median_ms,
        sgd_ratio=round(encode.median_ms / sgd.median_ms, 4),
        encode_first_ms=round(first_ms, 3),
        encode_load_s=round(encode.load_s, 4),
        update_bytes=update_size(model.form, model.shapes).nbytes,
        artifact_bytes=artifact,
        algorithm=model.algorithm.name,
        model=spec.name,
        parameters=sum(array.size for array in model.weights.values()),
        calls=len(encode.times),
    )


def _step(algorithm: Algorithm) -> Function:
    return algorithm.phases[-1].function


def _race(workers: Mapping[str, Worker], settings: EncodeSettings, say: Callable[[str], None]) -> float:
    """Let the workers take turns; milliseconds of the first encoding."""
    with running(workers.values(), "a codec"):
        [first] = workers["encode"].run(1, count=False)
        take_turns([*workers.values()], settings.repeat, say)
    return first


# -- what they are given ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _sgd(spec: ModelSpec, batch: int) -> tuple[CodedModel, Exported]:
    """Plain SGD and its step's graph, which all codecs are measured beside."""
    plain = CodedModel.of(spec, SGD, batch=batch)
    return plain, export(_step(plain.algorithm))


def write_graph(
    folder: Path, name: str, model: CodedModel, function: Function, exported: Exported | None = None
) -> int:
    """Write the graph of ``function`` and its inputs except noise, and return the bytes of the graph.

    The weights are those of a round after one step of each phase, because a codec must not have only zeros to send.
    """
    masks = model.algorithm.masks if function is model.algorithm.finish else {}
    weights = prefixed("weights", {name: tensor.detach() for name, tensor in model.spec.weights.items()})
    known = with_state(model.algorithm, weights, model.algorithm.phases)
    return write_function(folder, name, function, known, exported, masks)

"""``python -m benchmarks encode``: time in which a device serializes an update, beside one of its training steps.

Both run on the device's engine, from the graphs of a bundle, each in a fresh process of its own, in turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.coded_model import CODECS, CodedModel
from benchmarks.graphs import Exported, export, with_state, write_function
from benchmarks.options import Codecs, EngineThreads, Json, ZooModel, check_choice
from benchmarks.repetition import running, take_turns, worker_of
from benchmarks.results import bench
from edgefl.cli.options import ModelOptions
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import prefixed
from edgefl.models.spec import ModelSpec
from edgefl.models.zoo.catalog import build_model
from edgefl.setup.federation_options import parse_options
from edgefl.system.structs import filled
from edgefl.wire.update.form import update_size

SGD = "dense"
"""Codec whose local training is plain SGD."""
DEVICE = "benchmarks.workers.graph"


@dataclass(frozen=True)
class EncodeSettings:
    """Settings of the benchmark: ``repeat`` blocks of calls to each graph."""

    batch: int = 32
    threads: int = 1
    repeat: int = 5


class EncodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, medians (and minima) over all counted calls.

    Attributes:
        encode_ms: the algorithm's ``finish``: its noise drawn, its graph run, its update serialized.
        step_ms: the last phase's step of the same algorithm (FedBAT's binarized one), with its noise.
        ratio: ``encode_ms / step_ms``.
        sgd_step_ms: a step of plain SGD; ``sgd_ratio`` compares with it.
        encode_first_ms: first call in a new process.
        encode_load_s: seconds in which the graph was loaded.
        update_bytes: length of the update.
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


def encode(
    model: ZooModel = "resnet20",
    codec: Codecs = None,
    batch: Annotated[int, typer.Option(min=1, help="samples per step")] = 32,
    threads: EngineThreads = 1,
    repeat: Annotated[int, typer.Option(min=1, help="blocks of calls to each graph")] = 5,
    option: ModelOptions = None,
    as_json: Json = False,
) -> None:
    """Measure how long a device encodes an update, compared with one of its training steps.

    encode_ms: the algorithm's last graph, which codes the update, with its noise.
    step_ms: a step of the same algorithm, FedBAT's binarized one; sgd_step_ms: a step of plain SGD. Each graph runs on the
    device's engine in a process of its own, in turns with the others. Times are medians; --json has the minima and the
    first call of a process, too.

    Examples:

      python -m benchmarks encode --json

      python -m benchmarks encode --model resnet18 --codec fedbat --codec 'topk:share=0.01' --threads 2
    """

    check_choice([model], option or (), codecs=codec or ())

    settings = EncodeSettings(batch=batch, threads=threads, repeat=repeat)
    spec = build_model(model, **parse_options(option or ()))
    bench(
        "encode",
        f"encode: {spec.name}, batch {batch}, threads {threads}",
        codec or CODECS,
        lambda name, say: measure(spec, name, settings, say),
        _encode_columns,
        as_json,
    )


def _encode_columns(row: EncodeRow) -> dict[str, Any]:
    return {
        "codec": row.codec,
        "encode ms": row.encode_ms,
        "step ms": row.step_ms,
        "ratio": f"{row.ratio:.1%}",
        "SGD step ms": row.sgd_step_ms,
        "first ms": row.encode_first_ms,
        "KiB": f"{row.update_bytes / 2**10:.1f}",
    }


def measure(
    spec: ModelSpec, codec: str, settings: EncodeSettings, say: Callable[[str], None] = lambda _: None
) -> EncodeRow:
    """Measure one codec.

    Raises:
        ConfigError, ModelError: the codec does not exist, or not for this model.
        ExportError: its graphs cannot be exported.
    """
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
        with running(workers.values(), "a codec"):
            [first_ms] = workers["encode"].run(1, count=False)
            take_turns([*workers.values()], settings.repeat, lambda text: say(f"{codec}: {text}"))
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


@lru_cache(maxsize=1)
def _sgd(spec: ModelSpec, batch: int) -> tuple[CodedModel, Exported]:
    """Return plain SGD and its step's graph, with which all codecs are compared."""
    plain = CodedModel.of(spec, SGD, batch=batch)
    return plain, export(_step(plain.algorithm))


def write_graph(
    folder: Path, name: str, model: CodedModel, function: Function, exported: Exported | None = None
) -> int:
    """Write the graph of ``function`` and its inputs except noise, and return the bytes of the graph.

    The weights follow one step of each phase, because a codec must not have only zeros to send.
    """
    masks = model.algorithm.masks if function is model.algorithm.finish else {}
    weights = prefixed("weights", {name: tensor.detach() for name, tensor in model.spec.weights.items()})
    known = with_state(model.algorithm, weights, model.algorithm.phases)
    return write_function(folder, name, function, known, exported, masks)

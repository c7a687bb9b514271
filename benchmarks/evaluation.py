"""``python -m benchmarks evaluation``: an evaluation round on a device beside the forward passes of the same rows."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from benchmarks.machine import own_environment
from benchmarks.options import Json, check_choice
from benchmarks.results import bench
from edgefl.algorithms.evaluation import EVALUATE, evaluation
from edgefl.cli.options import Engines
from edgefl.config import parse
from edgefl.errors import EdgeflError
from edgefl.setup.bundles import bundle_of
from edgefl.setup.data import open_data
from edgefl.setup.model import federation_model
from edgefl.setup.training import tier_of
from edgefl.system.processes import module_command
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import write_bundle
from edgefl_export.compiler.request import Exchange

_BATCH, _SPLIT = 32, 0.2
_MODELS = ("cnn", "resnet8", "mobilenet")


class EvaluationCost(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of processor time in a process with one thread, in turns.

    Attributes:
        rows: rows of the device; a fifth of them is held out.
        forward_ms: the held-out rows in the same batches through the loaded ``evaluate`` graph.
        transfer_ms: time to make blobs of weights and graphs and to decode the weights, in place of a download.
        round_ms: a round: transfer, rows, three graphs that are loaded anew, forward passes, and the report.
        ratio: ``round_ms`` without ``transfer_ms``, over ``forward_ms``.
        first_ms: the first round, which divides the rows.
    """

    model: str
    engine: str
    rows: int
    held_out: int
    forward_ms: float
    transfer_ms: float
    round_ms: float
    ratio: float
    first_ms: float


def evaluation_round(
    model: Annotated[
        list[str] | None, typer.Option(help="a model, may be repeated; default: cnn, resnet8 and mobilenet")
    ] = None,
    engine: Engines = None,
    rows: Annotated[int, typer.Option(min=100, help="rows of the device")] = 4000,
    repeat: Annotated[int, typer.Option(min=1, help="repetitions")] = 9,
    as_json: Json = False,
) -> None:
    """Time of an evaluation round on a device beside the forward passes of its rows."""
    models = model or list(_MODELS)
    check_choice(models)
    names = [each.value for each in engine] if engine else ["onnx", "executorch"]
    cases = [(each, name) for each in models for name in names]
    bench(
        "evaluation",
        "an evaluation round beside its forward passes",
        cases,
        lambda case, _: measure(*case, rows=rows, repeat=repeat),
        _columns,
        as_json,
    )


def _columns(row: EvaluationCost) -> dict[str, Any]:
    return {
        "model": row.model,
        "engine": row.engine,
        "rows": f"{row.held_out} of {row.rows}",
        "forward, ms": f"{row.forward_ms:.0f}",
        "transfer, ms": f"{row.transfer_ms:.0f}",
        "round, ms": f"{row.round_ms:.0f}",
        "ratio": f"{row.ratio:.2f}",
        "first round, ms": f"{row.first_ms:.0f}",
    }


def measure(model: str, engine: str, *, rows: int, repeat: int) -> EvaluationCost:
    """Compile the evaluation bundle of ``model``, and time its rounds, forward passes and transfers.

    Args:
        model: a model of the zoo.
        engine: ``onnx`` or ``executorch``.
        rows: rows of the device, random numbers.
        repeat: number of turns.
    """
    federation = parse(
        {
            "model": {"name": model},
            "data": {"name": "random", "train_samples": rows},
            "algorithm": {"batch": _BATCH, "steps": 1},
            "evaluate": {"split": _SPLIT},
            "tiers": {"whole": {"count": 1}},
        },
        source="the benchmark",
    )
    dataset = open_data(federation)
    tier = tier_of(federation, federation_model(federation, dataset), "whole")
    exchange = Exchange(EVALUATE, evaluation(tier.algorithm), ())
    bundle = bundle_of(federation, dataset, tier, exchange, format=engine).bundle
    weights = {name: tensor.numpy() for name, tensor in tier.submodel.spec.weights.items()}
    with tempfile.TemporaryDirectory(prefix="edgefl-bench-") as folder:
        files = [Path(folder, name) for name in ("whole.efl", "model.safetensors", "data.npz")]
        write_bundle(bundle, files[0])
        files[1].write_bytes(tensors.dump(weights))
        np.savez(files[2], x=dataset.train_x, y=dataset.train_y)
        command = module_command("benchmarks.workers.evaluation", str(repeat), *map(str, files))
        environment = {**os.environ, **own_environment(1)}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise EdgeflError(f"the process that evaluates {model} on {engine} ended: {ended.stderr.strip()}")
    found = json.loads(ended.stdout.splitlines()[-1])
    ratio = (found["round_ms"] - found["transfer_ms"]) / found["forward_ms"]
    return EvaluationCost(model=model, engine=engine, rows=rows, ratio=round(ratio, 3), **found)

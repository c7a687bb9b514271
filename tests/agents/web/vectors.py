"""Vectors of what a device draws and reads, made by the reference for the browser agent's own tests.

``python -m tests.agents.web.vectors`` writes them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.random import Generator, Philox, SeedSequence
from PIL import Image

from edgefl.wire import tensors
from edgefl.wire.bundle.manifest import DataSpec
from edgefl_device.data.samples import Batches, DataPass, as_read, noise

FILE = Path(__file__).resolve().parents[3] / "agents" / "web" / "tests" / "vectors.json"

_SEEDS = (0, 7, 2**32, 2**62 + 1, 2**63 - 1)
_CHOICES = ((50, 12), (64, 64), (20_000, 500), (20_000, 300), (10_000, 9_000))


def _generator(*key: int) -> Generator:
    return Generator(Philox(SeedSequence(key)))


def _draws(key: tuple[int, ...]) -> dict[str, Any]:
    return {
        "key": [str(part) for part in key],
        "words": SeedSequence(key).generate_state(4).tolist(),
        "uint32": Philox(SeedSequence(key)).random_raw(5).view(np.uint32).tolist(),
        "permutation": _generator(*key).permutation(37).tolist(),
        "integers": _generator(*key).integers(0, 5, 32).tolist(),
        "floats": _generator(*key).random(5, dtype=np.float32).tolist(),
        "choices": [
            {"end": end, "count": count, "first": found[:20].tolist(), "sum": int(found @ np.arange(count))}
            for end, count in _CHOICES
            for found in [_generator(*key).choice(end, count, replace=False)]
        ],
    }


def _batches() -> list[dict[str, Any]]:
    lengths = np.array([3, 9, 5, 1, 8, 8, 2, 6, 7, 4], np.int64)
    cases = []
    for draws, samples, batch in (("walk", 10, 4), ("draw", 10, 4), ("walk", 3, 4), ("length", 10, 4)):
        buckets = np.searchsorted((4, 8), lengths) if draws == "length" else None
        batches = Batches(2**62 + 1, samples, batch, draws, buckets)  # type: ignore[arg-type]
        rows = [
            {"stream": stream, "step": step, "rows": batches.indices(stream, step).tolist()}
            for stream in (0, 1)
            for step in range(5)
        ]
        cases.append(
            {
                "draws": draws,
                "samples": samples,
                "batch": batch,
                "buckets": None if buckets is None else buckets.tolist(),
                "taken": rows,
            }
        )
    return cases


def _images() -> list[dict[str, Any]]:
    """Grey images and what Pillow makes of them, larger and smaller."""
    cases = []
    for width, height, to_width, to_height in (
        (7, 5, 3, 2),
        (6, 4, 9, 10),
        (40, 30, 8, 8),
        (8, 8, 8, 3),
        (5, 3, 1, 1),
    ):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width), np.uint8)
        small = Image.fromarray(pixels).resize((to_width, to_height), Image.Resampling.BILINEAR)
        cases.append(
            {
                "sizes": [width, height, to_width, to_height],
                "pixels": pixels.reshape(-1).tolist(),
                "resized": np.asarray(small).reshape(-1).tolist(),
            }
        )
    return cases


def _rectifier(dtype: int) -> str:
    """y = max(x * scale, 0) * scale of 40 numbers, an ONNX model in base64: what is between is no port."""
    vector, scalar = [40], []
    nodes = [
        onnx.helper.make_node("Mul", ["batch.0.x", "hyper.scale"], ["scaled"]),
        onnx.helper.make_node("Relu", ["scaled"], ["cut"]),
        onnx.helper.make_node("Mul", ["cut", "hyper.scale"], ["y"]),
    ]
    inputs = [
        onnx.helper.make_tensor_value_info(name, dtype, shape)
        for name, shape in (("batch.0.x", vector), ("hyper.scale", scalar))
    ]
    outputs = [onnx.helper.make_tensor_value_info("y", dtype, vector)]
    return _encoded(onnx.helper.make_graph(nodes, "rectifier", inputs, outputs))


def _fused() -> str:
    """relu(x @ w), an ONNX model in base64."""
    square = [4, 4]
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w"], ["product"]),
        onnx.helper.make_node("Relu", ["product"], ["y"]),
    ]
    x, w, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, square) for name in ("x", "w", "y")
    )
    return _encoded(onnx.helper.make_graph(nodes, "fused", [x, w], [y]))


def _sums() -> dict[str, Any]:
    """An evaluation's sums: correct + 65536, an ONNX model in base64, and the update that a device sends of 2^40 + 3."""
    ports = {
        name: onnx.helper.make_tensor_value_info(f"{name}.correct", onnx.TensorProto.INT64, [])
        for name in ("state", "update")
    }
    once = onnx.helper.make_tensor("once", onnx.TensorProto.INT64, [], [1 << 16])
    node = onnx.helper.make_node("Add", ["state.correct", "once"], ["update.correct"])
    graph = onnx.helper.make_graph([node], "finish", [ports["state"]], [ports["update"]], [once])
    update = tensors.dump({"correct": np.array((1 << 40) + 3 + (1 << 16), np.int64)})
    return {"finish": _encoded(graph), "update": base64.b64encode(update).decode()}


def _encoded(graph: onnx.GraphProto) -> str:
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    return base64.b64encode(model.SerializeToString(deterministic=True)).decode()


def vectors() -> dict[str, Any]:
    """What the file holds."""
    spec = DataSpec(shape=(4,), dtype="float32", classes=2, scale=1 / 255, shift=-0.4914)
    samples = np.array([[0, 1, 127, 255]], np.uint8)
    return {
        "draws": [_draws((seed, *rest)) for seed in _SEEDS for rest in ((), (3,), (1 << 20, 9, 2))],
        "batches": _batches(),
        "passes": [
            {"rows": DataPass(10, 4).indices(step).tolist(), "mask": DataPass(10, 4).mask(step).tolist()}
            for step in range(3)
        ],
        "noise": noise(2**62 + 1, 5, 1, (2, 3), "float32").reshape(-1).tolist(),
        "images": _images(),
        "scaled": as_read(samples, spec).reshape(-1).tolist(),
        "sums": _sums(),
        "rectifiers": {
            "float32": _rectifier(onnx.TensorProto.FLOAT),
            "float64": _rectifier(onnx.TensorProto.DOUBLE),
            "fused": _fused(),
        },
    }


def text() -> str:
    """The file's text."""
    return json.dumps(vectors()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())

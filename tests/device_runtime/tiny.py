"""A bundle made by hand, small enough to check by eye: two frozen units and a linear head trained by noisy SGD.

::

    forward 1:  record = relu(x @ stem)                    forward 2:  record = relu(x @ mid)
    start:      w = head, v = carry, count = 0
    step:       g = x^T (x w - y) / batch + noise / 100
                v = v / 2 + g,  w = w - lr v,  count = count + 1,  loss = mean((x w - y)^2)
    finish:     update = w,  carry = v
                coded: update = bits of w - head >= 0, from the lowest, and the mean of |w - head|
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from onnx import NodeProto, TensorProto, checker, helper, numpy_helper

from edgefl.wire import tensors
from edgefl.wire.blobs import BlobRef, describe
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import DataSpec, FrozenChunk, Graph, Manifest, PhaseSpec, Port, Role
from edgefl.wire.mqtt.messages import Offer, Round, Task
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data import samples as local_data
from edgefl_device.data.samples import Batches, LocalData
from edgefl_device.round.job import Job

ROWS, BATCH, WIDTH, STEPS = 10, 4, 3, 6
CHUNK = 256
DATA = DataSpec(shape=(WIDTH,), dtype="float32", classes=2)

_TYPES = {"float32": TensorProto.FLOAT, "int64": TensorProto.INT64, "uint8": TensorProto.UINT8}
_CONSTANTS = {
    "half": np.array(0.5, np.float32),
    "one": np.array(1, np.float32),
    "zero": np.array(0, np.float32),
    "rows": np.array(BATCH, np.float32),
    "hundredth": np.array(0.01, np.float32),
    "shape": np.array([WIDTH, 1], np.int64),
    "axis": np.array([1], np.int64),
    "powers": np.array([[1, 2, 4]], np.float32),
    "flat": np.array([1], np.int64),
}


def port(name: str, shape: tuple[int, ...], dtype: str = "float32") -> Port:
    return Port(name=name, role=msgspec.convert(name.partition(".")[0], Role), dtype=dtype, shape=shape)


X = port("batch.0.x", (BATCH, WIDTH))
Y = port("batch.0.y", (BATCH,), "int64")
LR = port("hyper.lr", ())
NOISE = port("noise.g", (WIDTH, 1))
W = port("state.weights.head.w", (WIDTH, 1))
V = port("state.momentum.head.w", (WIDTH, 1))
COUNT = port("state.count", ())
LOSS = port("metric.loss", ())


def node(op: str, inputs: str, output: str, **attributes: object) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)


def onnx_bytes(
    nodes: Sequence[NodeProto], inputs: Sequence[Port], outputs: Sequence[Port], constants: Sequence[str] = ()
) -> bytes:
    """A model whose outputs are called ``out.<port>``: ONNX allows no name on both sides."""
    graph = helper.make_graph(
        list(nodes),
        "tiny",
        [helper.make_tensor_value_info(p.name, _TYPES[p.dtype], p.shape) for p in inputs],
        [helper.make_tensor_value_info(f"out.{p.name}", _TYPES[p.dtype], p.shape) for p in outputs],
        [numpy_helper.from_array(_CONSTANTS[name], name) for name in constants],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString())


def graph_of(name: str, data: bytes, inputs: Sequence[Port], outputs: Sequence[Port]) -> Graph:
    ref = describe(data, CHUNK)
    return Graph(name=name, format="onnx", blob=ref, inputs=tuple(inputs), outputs=tuple(outputs))


@functools.cache
def forward(unit: str) -> tuple[Graph, bytes]:
    weight, record = port(f"weights.{unit}.w", (WIDTH, WIDTH)), port("record.x", (BATCH, WIDTH))
    nodes = [node("MatMul", f"batch.0.x {weight.name}", "h"), node("Relu", "h", "out.record.x")]
    data = onnx_bytes(nodes, (weight, X), (record,))
    return graph_of(f"forward.{unit}", data, (weight, X), (record,)), data


@functools.cache
def start() -> tuple[Graph, bytes]:
    inputs, outputs = (port("weights.head.w", W.shape), port("carry.v", V.shape)), (W, V, COUNT)
    nodes = [
        node("Identity", "weights.head.w", f"out.{W.name}"),
        node("Identity", "carry.v", f"out.{V.name}"),
        node("Identity", "zero", f"out.{COUNT.name}"),
    ]
    data = onnx_bytes(nodes, inputs, outputs, ["zero"])
    return graph_of("start", data, inputs, outputs), data


@functools.cache
def train() -> tuple[Graph, bytes]:
    inputs, outputs = (W, V, COUNT, X, Y, NOISE, LR), (W, V, COUNT, LOSS)
    nodes = [
        node("MatMul", f"batch.0.x {W.name}", "guess"),
        node("Cast", "batch.0.y", "labels", to=TensorProto.FLOAT),
        node("Unsqueeze", "labels axis", "target"),
        node("Sub", "guess target", "error"),
        node("Transpose", "batch.0.x", "xt", perm=[1, 0]),
        node("MatMul", "xt error", "gsum"),
        node("Div", "gsum rows", "gmean"),
        node("Mul", "noise.g hundredth", "dither"),
        node("Add", "gmean dither", "g"),
        node("Mul", f"{V.name} half", "v_half"),
        node("Add", "v_half g", f"out.{V.name}"),
        node("Mul", f"out.{V.name} hyper.lr", "move"),
        node("Sub", f"{W.name} move", f"out.{W.name}"),
        node("Add", f"{COUNT.name} one", f"out.{COUNT.name}"),
        node("Mul", "error error", "squares"),
        node("ReduceMean", "squares", "out.metric.loss", keepdims=0),
    ]
    data = onnx_bytes(nodes, inputs, outputs, ["half", "one", "rows", "hundredth", "axis"])
    return graph_of("train", data, inputs, outputs), data


@functools.cache
def finish() -> tuple[Graph, bytes]:
    inputs, outputs = (W, V), (port("update.head.w", W.shape), port("carry.v", V.shape))
    nodes = [node("Identity", W.name, "out.update.head.w"), node("Identity", V.name, "out.carry.v")]
    data = onnx_bytes(nodes, inputs, outputs)
    return graph_of("finish", data, inputs, outputs), data


@functools.cache
def coded_finish() -> tuple[Graph, bytes]:
    weights = port("weights.head.w", W.shape)
    inputs = (weights, W, V)
    outputs = (port("update.codes", (1,), "uint8"), port("update.scales", (1,)), port("carry.v", V.shape))
    nodes = [
        node("Sub", f"{W.name} {weights.name}", "change"),
        node("GreaterOrEqual", "change zero", "signs"),
        node("Cast", "signs", "bits", to=TensorProto.FLOAT),
        node("MatMul", "powers bits", "sum"),
        node("Cast", "sum", "byte", to=TensorProto.UINT8),
        node("Reshape", "byte flat", "out.update.codes"),
        node("Abs", "change", "sizes"),
        node("ReduceMean", "sizes", "mean", keepdims=0),
        node("Reshape", "mean flat", "out.update.scales"),
        node("Identity", V.name, "out.carry.v"),
    ]
    data = onnx_bytes(nodes, inputs, outputs, ["zero", "powers", "flat"])
    return graph_of("finish", data, inputs, outputs), data


def make_bundle(
    prefix: Sequence[str] = ("stem", "mid"), steps: Sequence[int] = (STEPS,), codec: str = "dense"
) -> BundleArchive:
    """``prefix`` units one chunk each; ``steps`` per phase, all of the same graph; any other ``codec`` codes."""
    return _bundle(tuple(prefix), tuple(steps), codec)


@functools.cache
def _bundle(prefix: tuple[str, ...], steps: tuple[int, ...], codec: str) -> BundleArchive:
    last = finish() if codec == "dense" else coded_finish()
    made = [forward(unit) for unit in prefix] + [start(), train(), last]
    manifest = Manifest(
        model="tiny",
        program="noisy-sgd",
        tier="weak" if prefix else "strong",
        parameters=WIDTH,
        data=DATA,
        batch=BATCH,
        prefix=tuple(FrozenChunk(units=(unit,), graph=f"forward.{unit}") for unit in prefix),
        suffix=("head",),
        start="start",
        phases=tuple(PhaseSpec(name=f"p{i}", graph="train", steps=count) for i, count in enumerate(steps)),
        finish="finish",
        evaluate="start",
        hyper={"lr": 0.1},
        graphs=tuple(graph for graph, _ in made),
        codec=codec,
        codec_version=1,
        draws="walk",
    )
    return BundleArchive(manifest, {graph.blob.sha256: data for graph, data in made})


def local(rows: int = ROWS) -> LocalData:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((rows, WIDTH)).astype(np.float32)
    return LocalData(x, (np.arange(rows) % 2).astype(np.int64), "tiny")


def weights() -> dict[str, Arrays]:
    """Weights by unit."""
    rng = np.random.default_rng(2)
    return {
        "stem": {"stem.w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)},
        "mid": {"mid.w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)},
        "head": {"head.w": rng.standard_normal((WIDTH, 1)).astype(np.float32)},
    }


@dataclass
class World:
    """What a server publishes for one round, and a source of blobs that counts."""

    bundle: BundleArchive
    units: dict[str, Arrays] = field(default_factory=weights)
    blobs: dict[str, bytes] = field(default_factory=dict)
    got: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unit_refs = {name: (self.add(tensors.dump(arrays)),) for name, arrays in self.units.items()}
        self.bundle_ref = self.add(self.bundle.encoded)
        self.blobs.update(self.bundle.blobs)

    def add(self, data: bytes) -> BlobRef:
        ref = describe(data, CHUNK)
        self.blobs[ref.sha256] = data
        return ref

    def get(self, ref: BlobRef) -> bytes:
        self.got.append(ref.sha256)
        return self.blobs[ref.sha256]

    def get_all(self, refs: Sequence[BlobRef]) -> list[bytes]:
        return [self.get(ref) for ref in refs]

    def task(self, *, number: int = 1, run: str = "run", nonce: str = "", samples: int = 0) -> Task:
        tier = self.bundle.manifest.tier
        return Task(run=run, round=number, tier=tier, seed=7, nonce=nonce or f"n{number}", samples=samples)

    def announcement(
        self, *, number: int = 1, run: str = "run", state: str = "open", base: int | None = None
    ) -> Round:
        return Round(
            run=run,
            round=number,
            state=state,  # type: ignore[arg-type]
            model_version="v1",
            offers={"onnx": Offer(bundles={self.bundle.manifest.tier: self.bundle_ref})},
            units=self.unit_refs,
            hyper={},
            deadline=0.0,
            base=number - 1 if base is None else base,
        )

    def job(self, *, samples: int = 0, hyper: Mapping[str, float] | None = None) -> Job:
        job = Job.of(self.task(samples=samples), self.announcement())
        assert job is not None
        return msgspec.structs.replace(job, hyper=dict(hyper or {}))


def expected_round(
    world: World, job: Job, rows: int, carry: Array | None = None
) -> tuple[Array, Array, float]:
    """(update, carry, mean loss) of a round in plain numpy, float32."""
    data = local(rows).fitted(DATA).first(job.samples)
    x = data.rows(np.arange(len(data)))
    for chunk in world.bundle.manifest.prefix:
        for unit in chunk.units:
            x = np.maximum(x @ world.units[unit][f"{unit}.w"], 0)
    w = world.units["head"]["head.w"]
    v = np.zeros_like(w) if carry is None else carry
    lr = np.float32(job.hyper.get("lr", 0.1))
    batches, losses = Batches(job.seed, len(data), BATCH), []
    for step in range(world.bundle.manifest.steps):
        at = batches.indices(0, step)
        error = x[at] @ w - data.y[at][:, None].astype(np.float32)
        dither = local_data.noise(job.seed, step, 0, NOISE.shape, "float32")
        v = v / 2 + x[at].T @ error / BATCH + dither / 100
        w = w - lr * v
        losses.append(float((error**2).mean()))
    return w, v, sum(losses) / len(losses)

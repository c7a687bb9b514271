"""How FIARSE's submodels train: algorithms in torch and from their ONNX graphs, rounds on the device, and the plain way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

from edgefl.algorithms.submodels.tcbgd import tcbgd
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.layers.norms import BatchNorm
from edgefl.models.spec import ModelSpec, sequential
from edgefl.objective.objective import Objective
from edgefl.submodels.importance.submodel import importance
from edgefl.submodels.importance.thresholds import Mask
from edgefl.submodels.submodel import Submodel
from edgefl.wire import tensors
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.regions import Placement
from edgefl.wire.tensors import Arrays
from edgefl_device.data.samples import Batches, LabelSpec, LocalData
from edgefl_device.engine import open_engine
from edgefl_export.capture.trace import capture
from edgefl_export.compiler.request import blobs_to_fetch
from edgefl_export.onnx.model import to_onnx
from edgefl_server.publish.model import unit_blobs
from tests.parity.rounds import device_round
from tests.support.bundles import build_bundle

Run = Callable[[Tensors], Tensors]
Masks = Mapping[str, Mask]
Batch = tuple[Tensor, Tensor]

ENGINES = ("torch", "onnx")
SIZE, CHANNELS, CLASSES = 6, 2, 3
BATCH, STEPS, LR = 4, 5, 0.2


class Halves(nn.Module):
    """Means over halves of each feature map, so that the classifier reads more than one value per channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=3).reshape(x.shape[0], x.shape[1], 2, -1).mean(dim=3).flatten(1)


def small_net(seed: int = 0) -> ModelSpec:
    """Convolution, static batch norm, convolution, classifier: 327 entries to choose from, 20 that are always dense."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        units = [
            (
                "stem",
                nn.Sequential(
                    nn.Conv2d(CHANNELS, 4, 3, padding=1, bias=False), BatchNorm(4, mode="static"), nn.ReLU()
                ),
            ),
            ("body", nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, bias=False), BatchNorm(6, mode="static"))),
            ("head", nn.Sequential(nn.ReLU(), Halves(), nn.Linear(12, CLASSES))),
        ]
    return ModelSpec("small", sequential(units), TensorSpec((CHANNELS, SIZE, SIZE)), CLASSES)


def batches_of(spec: ModelSpec, count: int, seed: int = 1) -> list[Batch]:
    """Random labelled batches."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn((BATCH, *spec.sample.shape), generator=generator),
            torch.randint(0, spec.classes, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def arrays_of(spec: ModelSpec) -> Arrays:
    return {name: tensor.numpy().copy() for name, tensor in spec.weights.items()}


def run_in(engine: str, function: Function) -> Run:
    """``function`` itself, or its exported graph in ONNX Runtime."""
    if engine == "torch":
        return function
    session = onnxruntime.InferenceSession(to_onnx(capture(function)), providers=["CPUExecutionProvider"])
    inputs = [port.name for port in session.get_inputs()]
    outputs = [port.name.removesuffix(".next") for port in session.get_outputs()]

    def run(given: Tensors) -> Tensors:
        found = session.run(None, {name: given[name].numpy() for name in inputs})
        return {name: torch.from_numpy(array) for name, array in zip(outputs, found, strict=True)}

    return run


@dataclass(frozen=True)
class Client:
    """The functions of one tier's round, in one engine; ``state`` has the names of ``state.*``."""

    start: Run
    train: Run
    finish: Run

    @classmethod
    def of(cls, algorithm: Algorithm, engine: str = "torch") -> Client:
        return cls(
            *(run_in(engine, f) for f in (algorithm.start, algorithm.phases[0].function, algorithm.finish))
        )

    def begin(self, payload: Mapping[str, Any]) -> Tensors:
        named = {name: torch.as_tensor(array) for name, array in payload.items()}
        return select(self.start(prefixed("weights", named)), "state")

    def step(self, state: Tensors, batch: Batch, lr: float = 0.1) -> tuple[Tensors, Tensors]:
        """(state, metrics) after one step."""
        given = {"batch.0.x": batch[0], "batch.0.y": batch[1], "hyper.lr": torch.tensor(lr)}
        out = self.train(prefixed("state", state) | given)
        return state | select(out, "state"), select(out, "metric")

    def walk(self, state: Tensors, batches: Sequence[Batch], lr: float = 0.1) -> Iterator[Tensors]:
        """The state before and after every step."""
        yield state
        for batch in batches:
            state = self.step(state, batch, lr)[0]
            yield state

    def update(self, state: Tensors) -> Tensors:
        return select(self.finish(prefixed("state", state)), "update")


def algorithm_of(submodel: Submodel, **options: Any) -> Algorithm:
    return tcbgd(Objective.of(submodel), **{"batch": BATCH, **options})


@cache
def client(engine: str, gamma: float, **options: Any) -> Client:
    """A client of the small net, made once: of the options, its ends know no more than what the optimizer keeps."""
    train = algorithm_of(importance(small_net(), gamma=gamma), **options).phases[0].function
    momentum, adamw = options.get("momentum", 0.0) > 0, options.get("adamw", False)
    start, finish = _ends(engine, gamma, momentum, adamw)
    return Client(start, run_in(engine, train), finish)


@cache
def _ends(engine: str, gamma: float, momentum: bool, adamw: bool) -> tuple[Run, Run]:
    kept = {"momentum": 0.5 if momentum else 0.0, "adamw": adamw}
    algorithm = algorithm_of(importance(small_net(), gamma=gamma), **kept)
    return run_in(engine, algorithm.start), run_in(engine, algorithm.finish)


def simulate(
    spec: ModelSpec,
    masks: Masks,
    theta: Mapping[str, float],
    batches: Sequence[Batch],
    lr: float,
    *,
    remask: bool = True,
    bias: bool = True,
    weights: Mapping[str, Tensor] | None = None,
) -> Tensors:
    """A client of section 2.6 on a dense copy of the whole model, SGD: the full-length weights after the last step."""
    w = {name: tensor.clone() for name, tensor in (weights or spec.weights).items()}
    module = spec.module.train()
    for x, y in batches:
        now = {name: torch.from_numpy(mask) for name, mask in masks.items()}
        if remask:
            now = {name: mask & (w[name].abs() >= theta[name]) for name, mask in now.items()}
        leaves = {
            name: torch.where(now[name], tensor, 0.0) if name in now else tensor for name, tensor in w.items()
        }
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in leaves.items()}
        out = torch.func.functional_call(module, leaves, (x,))
        grads = torch.autograd.grad(spec.loss.each(out, y).mean(), list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            g = grad
            if name in now:
                size, limit = w[name].abs(), theta[name]
                factor = 1 + 2 * size * limit / (size + limit).square() if bias and limit else 1.0
                g = torch.where(now[name], grad * factor, 0.0)
            w[name] = w[name] - lr * g
    return w


# -- rounds on the device runtime ------------------------------------------------------------------------------


def bundle_of(submodel: Submodel, tier: str, **options: Any) -> BundleArchive:
    """The tier's bundle, its algorithm ``tcbgd``."""
    spec = submodel.spec
    return build_bundle(
        algorithm_of(submodel, **options),
        blobs_to_fetch(submodel, tier),
        model=spec.name,
        tier=tier,
        data=DataSpec(shape=spec.sample.shape, dtype="float32", classes=spec.classes),
    )


@cache
def small_bundle(gamma: float) -> BundleArchive:
    """The small net's bundle of one size, made once."""
    return bundle_of(importance(small_net(), gamma=gamma), f"size-{gamma:g}", steps=STEPS, lr=LR)


def blobs_for(bundle: BundleArchive, placement: Placement, weights: Arrays) -> dict[str, bytes]:
    """What the server publishes of a round for this bundle, by the names the device fetches."""
    if placement.payload:
        return {bundle.manifest.suffix[0]: tensors.dump(placement.payload, placement.masks)}
    return dict(unit_blobs(weights, bundle.manifest.suffix))


def train_on_device(
    bundle: BundleArchive, published: Mapping[str, bytes], data: LocalData, seed: int, folder: Path
) -> Arrays:
    """The update of one round, by the device runtime, from the bundle's graphs and the published bytes."""
    manifest = bundle.manifest
    made = device_round(bundle, published, open_engine(manifest.graphs[0].format), folder, seed=seed)
    return made.run(data.fitted(manifest.data, LabelSpec.of(manifest))).update


def drawn_batches(data: LocalData, seed: int, steps: int) -> list[Batch]:
    """The batches that a device draws from ``data`` in a round with this seed."""
    order = Batches(seed, len(data), BATCH)
    rows = [order.indices(0, step) for step in range(steps)]
    return [(torch.from_numpy(data.x[at]), torch.from_numpy(data.y[at])) for at in rows]

"""FedBAT's rounds in torch, the operator by autograd through a floor, and a net whose step sizes run away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from edgefl.algorithms.quantized.fedbat import fedbat
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, select
from edgefl.models.losses import SquaredError
from edgefl.models.spec import ModelSpec, sequential
from edgefl.objective.objective import Objective
from edgefl.submodels.output_side.submodel import OutputSide
from edgefl.wire.tensors import Arrays
from edgefl.wire.update.decode import decode

BATCH = 8


@dataclass(frozen=True)
class HalfSquare(SquaredError):
    """(out - y)^2 / 2."""

    def each(self, out: Tensor, y: Tensor) -> Tensor:
        return super().each(out, y) / 2


def golden_spec() -> ModelSpec:
    """One weight w with F(W) = (W x - y)^2 / 2."""
    module = sequential([("only", nn.Linear(1, 1, bias=False))])
    return ModelSpec("one", module, TensorSpec((1,)), 1, loss=HalfSquare())


def regression(seed: int) -> ModelSpec:
    """356 parameters, 17 inputs, 4 outputs, squared error."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        units = [("hidden", nn.Sequential(nn.Linear(17, 16), nn.ReLU())), ("head", nn.Linear(16, 4))]
    return ModelSpec("regression", sequential(units), TensorSpec((17,)), 4, loss=SquaredError())


def algorithm_of(spec: ModelSpec, **options: Any) -> Algorithm:
    return fedbat(Objective.of(OutputSide(spec, 0, 1)), **{"batch": BATCH, "steps": 6, **options})


@dataclass(frozen=True)
class Feed:
    """The same batches for every algorithm; noise of its own stream for each step."""

    x: Tensor
    y: Tensor
    seed: int = 0

    @classmethod
    def of(cls, spec: ModelSpec, seed: int = 0, samples: int = 64) -> Feed:
        """Random samples with random class numbers."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((samples, *spec.sample.shape), generator=generator)
        return cls(x, torch.randint(0, spec.classes, (samples,), generator=generator), seed)

    @classmethod
    def linear(cls, spec: ModelSpec, seed: int, scale: float = 1.0, samples: int = 256) -> Feed:
        """A linear map of normal inputs of this deviation, with noise."""
        generator = torch.Generator().manual_seed(seed)
        x = scale * torch.randn((samples, *spec.sample.shape), generator=generator)
        teacher = torch.randn((spec.sample.shape[0], spec.classes), generator=generator)
        y = x @ teacher + 0.5 * torch.randn((samples, spec.classes), generator=generator)
        return cls(x, y, seed)

    def __call__(self, function: Function, step: int) -> Tensors:
        batches = torch.Generator().manual_seed(10_000 * self.seed + step)
        noise = torch.Generator().manual_seed(10_000 * self.seed + step + 5_000)
        if "batch.0.x" not in function.inputs:
            return uniform(function, noise)
        rows = torch.randint(0, len(self.x), (function.inputs["batch.0.x"].shape[0],), generator=batches)
        return {"batch.0.x": self.x[rows], "batch.0.y": self.y[rows]} | uniform(function, noise)


def uniform(function: Function, generator: torch.Generator) -> Tensors:
    """Its ``noise.*`` ports."""
    ports = sorted(name for name in function.inputs if name.startswith("noise."))
    return {name: torch.rand(function.inputs[name].shape, generator=generator) for name in ports}


@dataclass(frozen=True)
class Trace:
    """``states[s]`` is what step s begins with, the last one what training leaves; names without ``state.``."""

    states: list[Tensors]
    given: list[Tensors]
    metrics: list[Tensors]
    phases: list[str]

    def metric(self, name: str) -> list[float]:
        return [float(each[name]) for each in self.metrics]


def walk(algorithm: Algorithm, weights: Mapping[str, Tensor], feed: Feed) -> Trace:
    """Start and all steps by the algorithm's own functions."""
    common = prefixed("hyper", {name: torch.tensor(value) for name, value in algorithm.hyper.items()})
    state = algorithm.start(prefixed("weights", dict(weights)))
    trace = Trace([select(state, "state")], [], [], [])
    for phase in algorithm.phases:
        for _ in range(phase.steps):
            given = feed(phase.function, len(trace.given)) | common
            available = state | given
            out = phase.function({name: available[name] for name in phase.function.inputs})
            state = state | prefixed("state", select(out, "state"))
            trace.states.append(select(state, "state"))
            trace.given.append(given)
            trace.metrics.append(select(out, "metric"))
            trace.phases.append(phase.name)
    return trace


def step(function: Function, state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensors:
    """The state after one call, by names without ``state.``."""
    available = prefixed("state", dict(state)) | dict(given)
    return dict(state) | select(function({name: available[name] for name in function.inputs}), "state")


def drawing(algorithm: Algorithm, seed: int) -> Algorithm:
    """``algorithm`` whose ``finish`` has its noise, and reads none."""
    noise = uniform(algorithm.finish, torch.Generator().manual_seed(seed))
    fn, inputs = algorithm.finish.fn, algorithm.finish.inputs
    left = {name: port for name, port in inputs.items() if name not in noise}
    return replace(algorithm, finish=Function("finish", lambda given: fn(given | noise), left))


def decoded(algorithm: Algorithm, weights: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Arrays:
    """What the update of an algorithm on the whole model means: changes by name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    arrays = {name: tensor.numpy() for name, tensor in update.items()}
    names = [name for section in algorithm.form.sections for name in section.names]
    return decode(algorithm.form, arrays, dict.fromkeys(names), shapes)


# -- by the book -----------------------------------------------------------------------------------------------


class Floor(torch.autograd.Function):
    """Straight-through."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        return u.floor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def floor_form(x: Tensor, alpha: Tensor, zeta: Tensor) -> Tensor:
    """S as the paper prints it; + for zeta in the upper tail, [1 - p, 1)."""
    middle = alpha * (2 * Floor.apply((alpha + x) / (2 * alpha) + zeta) - 1)
    return torch.where(x > alpha, alpha, torch.where(x < -alpha, -alpha, middle))


def other_tail(zeta: Tensor) -> Tensor:
    """The draw of the ``where`` form that gives what ``zeta`` gives in the floor form."""
    return 1 - zeta


@dataclass(frozen=True)
class Plain:
    """One binarized step by autograd through :func:`floor_form`, in float64."""

    spec: ModelSpec
    rho: float = 6.0
    decay: float = 0.0

    def __call__(self, state: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``change.*`` and ``log_scale`` after it; step sizes are in the ascending order of names."""
        names = sorted(name for name, _ in self.spec.module.named_parameters())
        m = {name: state[f"change.{name}"].double().requires_grad_() for name in names}
        alpha_e, scale = state["log_scale"].double().requires_grad_(), state["scale"].double()

        alpha = dict(zip(names, scale * torch.exp(self.rho * alpha_e), strict=True))
        lr = given["hyper.lr"].double()

        zeta = {name: other_tail(given[f"noise.{name}"].double()) for name in names}
        loss = self._loss(
            state, given, {name: floor_form(m[name], alpha[name], zeta[name]) for name in names}
        )
        *grads, pull = torch.autograd.grad(loss, [*m.values(), alpha_e])
        moved = {f"change.{n}": (m[n] - lr * g).detach() for n, g in zip(names, grads, strict=True)}
        return moved | {"log_scale": (alpha_e - lr * pull).detach()}

    def _loss(self, state: Mapping[str, Tensor], given: Mapping[str, Tensor], s: Tensors) -> Tensor:
        """The loss at w + S."""
        at = {name: tensor.double() for name, tensor in select(dict(state), "weights").items()}
        at |= {name: at[name] + s[name] for name in s}
        out = torch.func.functional_call(self.spec.module, at, (given["batch.0.x"].double(),))
        y = given["batch.0.y"]
        losses = self.spec.loss.each(out, y.double() if y.is_floating_point() else y)
        decayed = sum(at[name].square().sum() for name in s if at[name].dim() >= 2)
        return losses.mean() + self.decay / 2 * decayed

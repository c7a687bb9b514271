"""Small problems with known gradients for FAFED's invariants, and every iteration of a federation on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from edgefl.contract.algorithm import Algorithm
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed
from edgefl.objective.objective import Objective
from reproduce.fafed.theorems import Itself
from tests.support.reference import Client, Completed, FederationState, Feed, MakeFeed, federated

X = "point.x"
Rows = Sequence[Sequence[float]]


class Bowl(nn.Module):
    """1/2 sum_k a_k (x_k - c_k)^2 for samples (a, c), each (B, 2, d)."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d))

    def forward(self, sample: Tensor) -> Tensor:
        a, c = sample[:, 0], sample[:, 1]
        return 0.5 * (a * (self.x - c) * (self.x - c)).sum(dim=1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Bowls:
    """Client i minimises 1/2 sum_k a_ik (x_k - c_ik)^2, with exact gradients."""

    a: Tensor
    c: Tensor

    @classmethod
    def of(cls, a: Rows, c: Rows) -> Bowls:
        return cls(torch.tensor(a, dtype=torch.float64), torch.tensor(c, dtype=torch.float64))

    @classmethod
    def drawn(cls, clients: int, d: int, seed: int) -> Bowls:
        generator = torch.Generator().manual_seed(seed)
        a = 0.5 + 3 * torch.rand(clients, d, generator=generator, dtype=torch.float64)
        return cls(a, torch.randn(clients, d, generator=generator, dtype=torch.float64))

    @property
    def objective(self) -> Objective:
        d = self.a.shape[1]
        return Objective(nn.Sequential(OrderedDict(point=Bowl(d))), TensorSpec((2, d)), Itself())

    @property
    def clients(self) -> list[Client]:
        label = torch.zeros(1, dtype=torch.float64)
        samples = torch.stack([self.a, self.c], dim=1)
        return [Client(number, sample[None], label) for number, sample in enumerate(samples)]

    def gradient(self, client: int, x: Tensor) -> Tensor:
        return self.a[client] * (x - self.c[client])


GOLDEN = Bowls.of([[1, 4], [3, 1]], [[1, -1], [-2, 2]])
"""The two clients of the golden vector (fafed.md, section 7)."""


def at(*x: float) -> Tensors:
    return {X: torch.tensor(x, dtype=torch.float64)}


def whole(_exchange: Algorithm, client: Client, _number: int) -> Feed:
    """Every batch is all that the client has: exact gradients."""
    given = prefixed("batch.0", {"x": client.x, "y": client.y})
    return lambda _function, _step: given


@dataclass(frozen=True)
class Iteration:
    """Iteration t of one client: its x_t, gn's estimates m_t and v_t, its preconditioner A and where x went."""

    x: Tensor
    m: Tensor
    v: Tensor | None
    A: Tensor | None
    after: Tensor
    given: Tensors


@dataclass(frozen=True)
class Trace:
    """``rounds[0]`` is the opening exchange; ``steps[t - 1][i]`` is iteration t of client i."""

    rounds: list[Completed]
    steps: list[list[Iteration]]

    def mean(self, t: int, what: Callable[[Iteration], Tensor]) -> Tensor:
        return torch.stack([what(each) for each in self.steps[t - 1]]).mean(0)

    def x(self, t: int) -> list[Tensor]:
        return [each.x for each in self.steps[t - 1]]

    def bar(self, t: int) -> Tensor:
        """xbar_t."""
        return self.mean(t, lambda each: each.x)


def traced(
    algorithm: Algorithm,
    weights: Tensors,
    clients: Sequence[Client],
    *,
    rounds: int,
    feed: MakeFeed = whole,
    hyper: dict[str, float] | None = None,
    standing: FederationState | None = None,
) -> Trace:
    """``rounds`` exchanges in all, the opening one among them, and what each iteration of each client did."""
    seen: list[Iteration] = []
    watched = watching(algorithm, seen)
    done = list(
        federated(
            watched, weights, clients, rounds=rounds, feed=feed, hyper=hyper, standing=standing, trained=[X]
        )
    )
    q, n = algorithm.phases[0].steps, len(clients)
    blocks = [seen[first : first + q * n] for first in range(0, len(seen), q * n)]
    steps = [[block[i * q + k] for i in range(n)] for block in blocks for k in range(q)]
    return Trace(done, steps)


def watching(algorithm: Algorithm, seen: list[Iteration]) -> Algorithm:
    (phase,) = algorithm.phases

    def fn(given: Tensors) -> Tensors:
        out = phase.function.fn(given)
        seen.append(
            Iteration(
                given[f"state.weights.{X}"],
                out[f"state.m.{X}"],
                out.get(f"state.v.{X}"),
                given.get(f"state.scale.{X}"),
                out[f"state.weights.{X}"],
                given,
            )
        )
        return out

    return with_step(algorithm, fn)


def with_step(algorithm: Algorithm, fn: Callable[[Tensors], Tensors]) -> Algorithm:
    """``algorithm`` with another step function."""
    (phase,) = algorithm.phases
    return replace(algorithm, phases=(replace(phase, function=replace(phase.function, fn=fn)),))


def with_start(algorithm: Algorithm, fn: Callable[[Tensors], Tensors]) -> Algorithm:
    """``algorithm`` with another start, for wrong variants of what a round begins with."""
    return replace(algorithm, start=replace(algorithm.start, fn=fn))


def close(found: Tensor, expected: Tensor | Sequence[float], tolerance: float = 1e-9) -> bool:
    wanted = torch.as_tensor(expected, dtype=found.dtype)
    return bool(torch.allclose(found, wanted, rtol=0, atol=tolerance))

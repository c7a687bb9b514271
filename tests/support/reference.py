"""Independent reference of a federation in torch: averages, a client's round, and whole federations in one process.

Tests compare device runtimes, the server and the simulator with it, and it shares no code with them. ::

    for done in federated(algorithm, weights, clients, rounds=100, seed=0):
        print(done.number, done.steps[0][-1]["loss"], done.server_state.keys())

float64 weights and data give float64 federations, for the invariants of the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from edgefl.contract.algorithm import Algorithm, Function, Phase
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec, prefixed, role_of, select
from edgefl.errors import ConfigError
from edgefl.wire.bundle.manifest import SAMPLE
from edgefl.wire.regions import Region, pieces

Upload = tuple[Mapping[str, Region], Mapping[str, Tensor]]


def partial_average(weights: Mapping[str, Tensor], uploads: Sequence[Upload]) -> Tensors:
    """Return the new global weights: each entry is the mean over the uploads that hold it (embracingfl.md 2.3 and 2.6).

    An upload is (regions, local tensors by name). An entry that no upload holds keeps its value. Computes in float64.
    """
    sums = {name: torch.zeros(tensor.numel(), dtype=torch.float64) for name, tensor in weights.items()}
    counts = {name: torch.zeros(tensor.numel(), dtype=torch.float64) for name, tensor in weights.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for regions, tensors in uploads:
        for name, region in regions.items():
            values, start = tensors[name].reshape(-1), 0
            for part, positions in pieces(name, region, shapes):
                entries = (
                    torch.arange(sums[part].numel()) if positions is None else torch.from_numpy(positions)
                )
                sums[part][entries] += values[start : start + len(entries)]
                counts[part][entries] += 1
                start += len(entries)
    return {
        name: torch.where(
            counts[name] > 0, sums[name] / counts[name].clamp_min(1), tensor.reshape(-1).double()
        )
        .to(tensor.dtype)
        .reshape(tensor.shape)
        for name, tensor in weights.items()
    }


# (step function, step over all phases) -> its batch.* and noise.* inputs.
Feed = Callable[[Function, int], Tensors]
Samples = Mapping[str, Tensor]
"""Samples of a client by the parts of a batch: rows ``x``, labels ``y``, and additional inputs."""


@dataclass(frozen=True)
class RoundResult:
    """Result of a round: the update, the carry, and metrics (one dict per step)."""

    update: Tensors
    carry: Tensors
    metrics: tuple[Tensors, ...]


def run_round(
    algorithm: Algorithm,
    weights: Mapping[str, Tensor],
    feed: Feed,
    *,
    hyper: Mapping[str, float] | None = None,
    carry: Mapping[str, Tensor] | None = None,
    samples: Samples | None = None,
) -> RoundResult:
    """Run ``start``, every phase's steps, and ``finish``.

    Args:
        algorithm: Exchange to run.
        weights: Tensors of the model, with the server's state; may be the whole model's. Scalars get their dtype.
        feed: Returns the batches and noise of each step, and the noise of ``finish``.
        hyper: Overrides the algorithm's defaults.
        carry: Result of the previous round. Default: zeros.
        samples: Samples for a phase over the data.
    """
    dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), torch.float32)
    scalars = {
        name: torch.tensor(value, dtype=dtype) for name, value in {**algorithm.hyper, **(hyper or {})}.items()
    }
    ports = {**algorithm.start.inputs, **algorithm.finish.inputs}
    carry_inputs = {name: spec.zeros(dtype) for name, spec in ports.items() if role_of(name) == "carry"}
    carry_inputs |= prefixed("carry", carry or {})
    common = prefixed("hyper", scalars) | carry_inputs | prefixed("weights", weights)
    state, step, metrics = _role("state", _run(algorithm.start, common)), 0, []
    for phase in algorithm.phases:
        for inputs in _inputs(phase, step, feed, samples):
            out = _run(phase.function, common | state | inputs)
            state = state | _role("state", out)
            metrics.append(select(out, "metric"))
            step += 1
    draws = any(role_of(name) == "noise" for name in algorithm.finish.inputs)
    final = _run(algorithm.finish, common | state | (feed(algorithm.finish, step) if draws else {}))
    return RoundResult(select(final, "update"), select(final, "carry"), tuple(metrics))


def _inputs(phase: Phase, step: int, feed: Feed, samples: Samples | None) -> Iterator[Tensors]:
    """Yield the inputs of each step of a phase, the first of which is number ``step``."""
    if not phase.over_data:
        for number in range(step, step + phase.steps):
            yield feed(phase.function, number)
        return
    if samples is None:
        raise ValueError(f"phase {phase.name!r} passes over the data; give run_round the samples")
    count, size = len(samples["y"]), phase.function.inputs["batch.0.x"].shape[0]
    for first in range(0, count, size):
        rows = torch.arange(first, first + size)
        dtype = samples["x"].dtype if samples["x"].is_floating_point() else torch.float32
        batch = {**_rows(samples, rows.remainder(count)), "mask": (rows < count).to(dtype)}
        yield feed(phase.function, step + first // size) | prefixed("batch.0", batch)


def _rows(parts: Samples, rows: Tensor) -> Tensors:
    return {name: tensor[rows] for name, tensor in parts.items()}


def _run(function: Function, available: Mapping[str, Tensor]) -> Tensors:
    return function({name: available[name] for name in function.inputs})


def _role(role: str, tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if role_of(name) == role}


SELECTION, NOISE = 1 << 20, 1 << 21
"""Random streams beside those of the batches, which are numbered from 0."""


@dataclass(frozen=True, eq=False)
class Client:
    """A user's samples x (n, *sample), labels y (n, *label) and inputs beside x. ``number`` decides its random streams."""

    number: int
    x: Tensor
    y: Tensor
    others: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def samples(self) -> Samples:
        """Samples by the parts of a batch."""
        return {"x": self.x, SAMPLE: self.x, **self.others, "y": self.y}


@dataclass(frozen=True)
class Completed:
    """A completed exchange: round ``number`` (from 1), the new model and server state.

    ``updates``, ``carries`` and ``steps`` (metrics, one dict per step) are by client number.
    """

    number: int
    weights: Tensors
    server_state: Tensors
    selected: tuple[int, ...]
    updates: Mapping[int, Tensors]
    carries: Mapping[int, Tensors]
    steps: Mapping[int, tuple[Tensors, ...]]


@dataclass(frozen=True)
class FederationState:
    """State of a federation, enough to continue it to the same bits."""

    weights: Tensors
    server_state: Tensors
    carries: Mapping[int, Tensors] = field(default_factory=dict)
    completed: int = 0


MakeFeed = Callable[[Algorithm, Client, int], Feed]
"""(exchange, client, round) -> inputs of its steps."""


def federated(
    algorithm: Algorithm,
    weights: Mapping[str, Tensor],
    clients: Sequence[Client],
    *,
    rounds: int,
    seed: int = 0,
    fraction: float | Fraction = 1,
    hyper: Mapping[str, float] | None = None,
    trained: Sequence[str] | None = None,
    feed: MakeFeed | None = None,
    standing: FederationState | None = None,
) -> Iterator[Completed]:
    """Yield rounds ``standing.completed + 1 .. rounds``, one exchange each. Updates are averaged without weights.

    Args:
        algorithm: Main exchange.
        weights: Initial model.
        clients: Clients.
        rounds: Last round.
        seed: Seed of selection and batches.
        fraction: Share of the clients in a round, drawn without replacement.
        hyper: Overrides the scalars.
        trained: Parameters with server state. Default: all of ``weights``.
        feed: Makes the inputs of steps. Default: :func:`drawn`.
        standing: State to continue from.

    Raises:
        ConfigError: ``fraction * len(clients)`` is no whole number.
    """
    count = _whole_share(fraction, len(clients))
    now = standing or begun(algorithm, weights, trained)
    make = feed or (lambda exchange, client, number: drawn(exchange, client, seed, number))
    for number in range(now.completed + 1, rounds + 1):
        exchange = exchange_at(algorithm, number - 1)
        scalars = {**exchange.hyper, **exchange.schedule(number - 1, rounds), **(hyper or {})}
        chosen = selection(seed, number, len(clients), count)
        global_state = {**now.weights, **now.server_state}
        results = {
            clients[at].number: run_round(
                exchange,
                global_state,
                make(exchange, clients[at], number),
                hyper=scalars,
                carry=now.carries.get(clients[at].number),
                samples=clients[at].samples,
            )
            for at in chosen
        }
        share = {"share": count / len(clients)}
        after = completed(exchange, global_state, [each.update for each in results.values()], scalars | share)
        carries = {**now.carries, **{number: each.carry for number, each in results.items() if each.carry}}
        now = FederationState(
            {name: after[name] for name in now.weights},
            {name: after[name] for name in now.server_state},
            carries,
            number,
        )
        yield Completed(
            number,
            now.weights,
            now.server_state,
            tuple(results),
            {name: each.update for name, each in results.items()},
            carries,
            {name: each.metrics for name, each in results.items()},
        )


def exchange_at(algorithm: Algorithm, position: int) -> Algorithm:
    """Return the exchange after ``position`` completed ones: the opening ones once, then the others in turn."""
    if position < len(algorithm.opening):
        return algorithm.opening[position]
    turns = (*algorithm.ahead, algorithm)
    return turns[(position - len(algorithm.opening)) % len(turns)]


def begun(
    algorithm: Algorithm, weights: Mapping[str, Tensor], trained: Sequence[str] | None = None
) -> FederationState:
    """Return the state before the first round, with the initial server state of all exchanges."""
    names = weights.keys() if trained is None else trained
    server_state: Tensors = {}
    for state, value in algorithm.server_state.items():
        server_state |= beside(state, {name: torch.full_like(weights[name], value) for name in names})
    return FederationState(dict(weights), server_state)


def completed(
    exchange: Algorithm, before: Tensors, updates: Sequence[Tensors], scalars: Mapping[str, float]
) -> Tensors:
    """Return weights and server state after an exchange: unfold each update, average, and take the server's step."""
    unfolded = [exchange.server.unfold(update) for update in updates]
    mean = partial_average(before, [(dict.fromkeys(update), update) for update in unfolded])
    return mean | exchange.server.step(before, mean, scalars)


def selection(seed: int, number: int, clients: int, count: int) -> list[int]:
    """Return ``count`` of the ``clients`` for round ``number``: uniform, without replacement, ascending."""
    positions = np.random.default_rng((seed, SELECTION, number)).choice(clients, count, replace=False)
    return sorted(int(at) for at in positions)


def drawn(exchange: Algorithm, client: Client, seed: int, number: int) -> Feed:
    """Return a feed whose batches are drawn anew, without replacement if the client has enough samples.

    Stream k of step t depends on (seed, client, round, k, t) alone.
    """

    def feed(function: Function, step: int) -> Tensors:
        inputs: Tensors = {}
        for name, spec in function.inputs.items():
            key = (seed, client.number, number, step)
            if role_of(name) == "batch":
                _, stream, part = name.split(".", 2)
                if part == "mask":
                    continue  # which whoever passes over the data sets
                rows = draw(len(client.x), spec.shape[0], (*key, int(stream)))
                inputs[name] = client.samples[part][rows]
            elif role_of(name) == "noise":
                place = list(function.inputs).index(name)
                inputs[name] = _uniform(spec, (*key, NOISE, place), client.x.dtype)
        return inputs

    return feed


def draw(samples: int, batch: int, key: tuple[int, ...]) -> Tensor:
    """Return ``batch`` row numbers: without replacement, or with it if there are fewer ``samples``."""
    rows = np.random.default_rng(key).choice(samples, batch, replace=samples < batch)
    return torch.from_numpy(rows)


def _uniform(spec: TensorSpec, key: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    values = torch.from_numpy(np.random.default_rng(key).random(spec.shape, dtype=np.float32))
    return values.to(dtype if dtype.is_floating_point else torch.float32)


def _whole_share(fraction: float | Fraction, clients: int) -> int:
    wanted = Fraction(fraction).limit_denominator(10**6) * clients
    if wanted.denominator != 1 or not 1 <= wanted <= clients:
        raise ConfigError(
            f"a round takes fraction * clients = {float(wanted):g} of {clients} clients, which should be a whole number "
            f"from 1 to {clients}; change the fraction or the number of clients",
            fraction=float(fraction),
            clients=clients,
        )
    return int(wanted)

"""Whole federations in torch, one process: an algorithm's own functions on many clients, and its server's step between them.

::

    for done in federated(algorithm, weights, clients, rounds=100, seed=0):
        print(done.number, done.metrics["loss"], done.server_state.keys())

Nothing here is float32 by nature: float64 weights and data give float64 federations, for the invariants of the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.server import beside
from edgefl.contract.tensors import Tensors, TensorSpec, role_of
from edgefl.errors import ConfigError
from edgefl.simulation.average import partial_average
from edgefl.simulation.round import Feed, Samples, run_round
from edgefl.wire.bundle.manifest import SAMPLE

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
        """By the parts of a batch."""
        return {"x": self.x, SAMPLE: self.x, **self.others, "y": self.y}


@dataclass(frozen=True)
class Completed:
    """An exchange that was completed: round ``number`` (from 1), the new model, and what was left where.

    ``updates``, ``carries`` and ``metrics`` (one dict per step) are by client number.
    """

    number: int
    weights: Tensors
    server_state: Tensors
    selected: tuple[int, ...]
    updates: Mapping[int, Tensors]
    carries: Mapping[int, Tensors]
    steps: Mapping[int, tuple[Tensors, ...]]


@dataclass(frozen=True)
class Standing:
    """Where a federation stands: enough to go on from, bit for bit."""

    weights: Tensors
    server_state: Tensors
    carries: Mapping[int, Tensors] = field(default_factory=dict)
    completed: int = 0


MakeFeed = Callable[[Algorithm, Client, int], Feed]
"""(exchange, client, round) -> what feeds its steps."""


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
    standing: Standing | None = None,
) -> Iterator[Completed]:
    """Rounds ``standing.completed + 1 .. rounds``. Each is one exchange; updates are averaged without weights, in the
    order of the clients.

    A round takes ``fraction * len(clients)`` clients, drawn without replacement; ConfigError if that is no whole number.
    ``trained`` names the parameters that have a place in the server's state (default: all of ``weights``). ``feed``
    defaults to :func:`drawn`.
    """
    count = _whole_share(fraction, len(clients))
    now = standing or begun(algorithm, weights, trained)
    make = feed or (lambda exchange, client, number: drawn(exchange, client, seed, number))
    for number in range(now.completed + 1, rounds + 1):
        exchange = algorithm.exchange(number - 1)
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
        now = Standing(
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


def begun(
    algorithm: Algorithm, weights: Mapping[str, Tensor], trained: Sequence[str] | None = None
) -> Standing:
    """Before the first round: the server's state of all exchanges at its initial values."""
    names = weights.keys() if trained is None else trained
    server_state: Tensors = {}
    for state, value in algorithm.server_state.items():
        server_state |= beside(state, {name: torch.full_like(weights[name], value) for name in names})
    return Standing(dict(weights), server_state)


def completed(
    exchange: Algorithm, before: Tensors, updates: Sequence[Tensors], scalars: Mapping[str, float]
) -> Tensors:
    """Weights and server state after an exchange: unfold each update, average, and the server's step."""
    unfolded = [exchange.server.unfold(update) for update in updates]
    mean = partial_average(before, [(dict.fromkeys(update), update) for update in unfolded])
    return mean | exchange.server.step(before, mean, scalars)


def selection(seed: int, number: int, clients: int, count: int) -> list[int]:
    """Which ``count`` of the ``clients`` take part in round ``number``: uniform, without replacement, ascending."""
    positions = np.random.default_rng((seed, SELECTION, number)).choice(clients, count, replace=False)
    return sorted(int(at) for at in positions)


def drawn(exchange: Algorithm, client: Client, seed: int, number: int) -> Feed:
    """Batches of round ``number`` for ``client``, each drawn anew: without replacement inside, with it where the client
    has fewer samples than a batch. Stream k of step t depends on (seed, client, round, k, t) alone."""

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
    """``batch`` row numbers: without replacement, or with it where there are fewer ``samples``."""
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

"""Local rounds of clients, from their data to the sums of a round, on every kind of trainer, and the messages to
trainers.

Messages are plain data that can be pickled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Protocol

import numpy as np
import torch

from edgefl.config.rounds import SimulationTable
from edgefl.errors import ConfigError, UpdateRejected
from edgefl.simulator.clients import ClientData
from edgefl.simulator.functions import Functions
from edgefl.simulator.training import ClientTraining, Participant, TierInputs
from edgefl.wire import tensors
from edgefl.wire.regions import Region, extract
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import VALUE_LIMIT, Form, float32_bytes
from edgefl_device.data.samples import fit_rows
from edgefl_device.round.trainer import RoundResult
from edgefl_server.coordinator.claims import UpdateClaim, weight_of
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.coordinator.states import OpenRound
from edgefl_server.publish.model import ModelVersion
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.rounds import FixedDownlink, RoundModel
from edgefl_server.run_spec import RunSpec

ReadCarry = Callable[[int], Arrays]
"""Function that reads a carry by the number in :class:`ClientPortion`."""


@dataclass(frozen=True)
class RoundTask:
    """Open round, as trainers receive it.

    Attributes:
        opened: The round, with the tasks of its clients.
        model: Model of the round.
        weights: Downloaded weights by tier, then by the label of the graph input that reads them.
        hyper: Scalars of the algorithm for the round, by name.
        received: Model as clients receive it, if the sums depend on it
            (:func:`edgefl_server.rounds.compares_updates`); else empty.
        since: Model of an earlier round from which these clients began; None if they began from ``model``.
    """

    opened: OpenRound
    model: ModelVersion
    weights: Mapping[str, Arrays]
    hyper: Mapping[str, float]
    received: Arrays
    since: ModelVersion | None = None

    @property
    def began(self) -> ModelVersion:
        """Model from which the clients of this task begin: ``since``, or else ``model``."""
        return self.since or self.model

    @property
    def start(self) -> RoundModel:
        """Model of the round, with the weights as clients receive them."""
        return RoundModel(self.model, FixedDownlink(self.received))

    @property
    def older(self) -> Mapping[int, RoundModel]:
        """Earlier model :attr:`since`, from which these clients began, by the number of the round that began from it.

        Its weights are rounded as clients receive them. Empty if :attr:`since` is None.
        """
        since = self.since
        return {} if since is None else {since.number + 1: RoundModel(since, FixedDownlink(self.received))}


@dataclass(frozen=True)
class ClientPortion:
    """Group of clients of one tier that a trainer trains together.

    Carries are the state that an algorithm keeps on a client. The division into portions does not depend on the
    trainers, because a group of other clients gives other bits.

    Attributes:
        tier: Name of the tier.
        clients: Names of the clients.
        kept: Row number of a client's carry in the store, by client. A client without a carry is left out.
    """

    tier: str
    clients: tuple[str, ...]
    kept: Mapping[str, int] = field(default_factory=dict)

    def carries(self, read: ReadCarry) -> dict[str, Arrays]:
        """Return the carries of the clients (state that the algorithm keeps on a client between its rounds), by client.

        ``read`` loads a carry by its row number in the store.
        """
        return {client: read(number) for client, number in self.kept.items()}


@dataclass(frozen=True)
class Report:
    """Result of training one client.

    Attributes:
        client: Name of the client.
        refused: Reason why the server refused its update, or empty. If it is set, the other fields are not.
        loss: Training loss; NaN if the algorithm reports none.
        up_bytes: Bytes of the tensors in the update; ``up_float32_bytes`` the same in float32.
        carry: State that the algorithm keeps on the client for its next round, by name.
    """

    client: str
    refused: str = ""
    loss: float = math.nan
    up_bytes: int = 0
    up_float32_bytes: int = 0
    carry: Arrays = field(default_factory=dict)


class Trainers(Protocol):
    """Interface of trainers. They train clients, validate each update in its encoded form, and add it to the round's
    sums.
    """

    def begin(self, task: RoundTask, active: RoundAggregation) -> None:
        """Begin a round. :meth:`train` adds updates to the sums of ``active`` until the next call."""

    def train(self, portions: Sequence[ClientPortion], read: ReadCarry) -> Iterator[Report]:
        """Train the clients of ``portions`` and yield the report of each client once, in any order.

        After the last report, all updates are in the sums. If training of portions fails, the error of the first such
        portion is raised.

        Args:
            portions: Groups of clients to train.
            read: Function that loads a client's carry (state that the algorithm keeps on it) by row number in the
                store.
        """

    def close(self) -> None:
        """Release all workers."""


@dataclass(frozen=True)
class Attack:
    """Attack by the clients that ``table`` lists as hostile. Their updates pass every validation of the server."""

    table: SimulationTable

    def by(self, client: str) -> bool:
        """Return True if the client is hostile."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.hostile)

    def sent(
        self, update: Arrays, weights: Mapping[str, Array], regions: Mapping[str, Region], form: Form
    ) -> Arrays:
        """Return the update that a hostile client sends instead of its honest one.

        Args:
            update: Honest update, by name.
            weights: Model that the client began from, by global name.
            regions: Position of each tensor of the update in the global model.
            form: Layout of the update's arrays.

        Raises:
            ConfigError: If the update holds codes or changes instead of weights.
        """
        if form.sections or form.change:
            raise ConfigError(
                f"simulation.hostile clients send weights, and codec {form.codec!r} sends codes: set codec.name to 'dense'",
                codec=form.codec,
            )
        base = extract(weights, regions)
        if self.table.attack == "flip":
            return {
                name: _flip_change(base[name], trained, self.table.strength)
                for name, trained in update.items()
            }
        return {name: _ruin_statistics(name, array) for name, array in update.items()}


def _flip_change(base: Array, trained: Array, strength: float) -> Array:
    """Return ``base - strength * (trained - base)``, clipped to the limits that the server accepts."""
    away = base - np.float32(strength) * (trained - base)
    return np.clip(away, -VALUE_LIMIT, VALUE_LIMIT).astype(trained.dtype)


def _ruin_statistics(name: str, array: Array) -> Array:
    """Return ``array`` unless ``name`` is a moving mean or variance. For these, return an array filled with the limit
    that the server accepts.
    """
    kind = name.rpartition(".")[2]
    if kind not in ("running_mean", "running_var"):
        return array
    return np.full_like(array, -VALUE_LIMIT if kind == "running_var" else VALUE_LIMIT)


class LocalRounds:
    """Local rounds of clients in this process, as every kind of trainer runs them.

    Args:
        spec: Specification of the run.
        functions: Functions of the clients, by (tier, index of the exchange).
        data: Training data of the clients.
        together: Number of clients that are trained at a time; 0 for as many as suit the functions.
    """

    def __init__(
        self, spec: RunSpec, functions: Mapping[tuple[str, int], Functions], data: ClientData, together: int
    ) -> None:
        self._spec = spec
        self._functions = functions
        self._training = {key: ClientTraining(each, together) for key, each in functions.items()}
        self._data = data
        self._attack = Attack(next((each.table for each in functions.values()), SimulationTable()))
        self._inputs: dict[str, TierInputs] = {}

    def begin(self, task: RoundTask) -> None:
        self._task = task
        self._inputs = {}

    def train(
        self, active: RoundAggregation, portion: ClientPortion, carries: Mapping[str, Arrays]
    ) -> list[Report]:
        """Train the clients of ``portion``, add their updates to the sums of ``active``, and return a report per client.
        Call :meth:`begin` before.

        Args:
            active: Sums of the round.
            portion: Clients of one tier.
            carries: State that the algorithm kept on a client, by client. Clients without it are left out.
        """
        key = portion.tier, self._spec.index(self._task.opened.position)
        with _one_thread():
            taking = [
                self._participant(client, self._functions[key], carries.get(client, {}))
                for client in portion.clients
            ]
            results = self._training[key].run(self._inputs_of(portion.tier, self._functions[key]), taking)
            return [self._add_update(active, client.name, result) for client, result in results]

    def _inputs_of(self, tier: str, functions: Functions) -> TierInputs:
        if tier not in self._inputs:
            # Copies: what came is read-only, and may lie where torch would not have put it.
            arrays, device = self._task.weights[tier], functions.device
            weights = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
            self._inputs[tier] = TierInputs(weights, self._task.hyper)
        return self._inputs[tier]

    def _participant(self, client: str, functions: Functions, carry: Arrays) -> Participant:
        manifest = functions.manifest
        data = fit_rows(self._data.of(client), manifest, functions)
        seed = self._task.opened.assignments[client].seed
        return Participant(client, seed, data.first(self._spec.rules.samples), carry)

    def _add_update(self, active: RoundAggregation, client: str, result: RoundResult) -> Report:
        """Encode, validate and add a client's update, and return its report."""
        rules, opened = self._spec.rules, self._task.opened
        task, version = opened.assignments[client], self._task.began.version
        sent = tensors.dump(self._sent_by(active, task, result), result.masks)
        claim = UpdateClaim(client, rules.run, task.round, task.nonce, task.tier, version, result.samples)
        try:
            weight = active.weight(weight_of(rules, task, version, claim))
            checked = active.check_sent(task.tier, sent, task.round, result.samples)
        except UpdateRejected as refusal:
            return Report(client, refused=refusal.message)
        active.aggregator.add(checked.added, weight, rules.share(opened.number - task.round))
        return Report(
            client,
            loss=result.metrics.get("loss", float("nan")),
            up_bytes=len(sent),
            up_float32_bytes=float32_bytes(checked.sent.pieces.shapes),
            carry=result.carry,
        )

    def _sent_by(self, active: RoundAggregation, task: Assignment, result: RoundResult) -> Arrays:
        if active.spec.evaluates or not self._attack.by(task.device):
            return result.update
        reading = active.update_layout(task.tier, task.round)
        return self._attack.sent(result.update, self._task.began.weights, reading.sent, reading.form)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Context in which torch uses one thread, because the number of threads changes the order of additions."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

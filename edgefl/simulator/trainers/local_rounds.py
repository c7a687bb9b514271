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
from edgefl_device.data.samples import LabelSpec
from edgefl_device.round.trainer import RoundResult
from edgefl_server.coordinator.claims import Claim, weight_of
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
        opened: The round.
        model: Model of the round.
        weights: Downloads of the clients, by tier and label of the port.
        hyper: Scalars of the round.
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
        """Model from which its clients begin."""
        return self.since or self.model

    @property
    def start(self) -> RoundModel:
        """Model of the round, with the weights as clients receive them."""
        return RoundModel(self.model, FixedDownlink(self.received))

    @property
    def older(self) -> Mapping[int, RoundModel]:
        """Model of an earlier round from which its clients began, by that round's number; empty if they began from
        ``model``.
        """
        since = self.since
        return {} if since is None else {since.number + 1: RoundModel(since, FixedDownlink(self.received))}


@dataclass(frozen=True)
class ClientPortion:
    """Clients of a tier that one trainer trains at a time. ``kept``: number of each client's carry, if it has one.

    The division into portions does not depend on the trainers, because the clients of a portion are trained together.
    """

    tier: str
    clients: tuple[str, ...]
    kept: Mapping[str, int] = field(default_factory=dict)

    def carries(self, read: ReadCarry) -> dict[str, Arrays]:
        """Return the carries of its clients that have one, read by ``read``."""
        return {client: read(number) for client, number in self.kept.items()}


@dataclass(frozen=True)
class Report:
    """Result of a client. ``refused``: reason for the refusal of its update, or empty; then the other fields are not
    set.
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
        """Begin a round. Updates are added to the sums ``active``."""

    def train(self, portions: Sequence[ClientPortion], read: ReadCarry) -> Iterator[Report]:
        """Train ``portions`` and yield the report of every client once, in any order.

        After the last report, all updates are in the sums. An error of data or bundles is raised for the first such
        portion.
        """

    def close(self) -> None:
        """Release all workers."""


@dataclass(frozen=True)
class Attack:
    """Attack by the clients that ``table`` names as hostile. Their updates pass every validation of the server."""

    table: SimulationTable

    def by(self, client: str) -> bool:
        """Return True if the client is hostile."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.hostile)

    def sent(
        self, update: Arrays, weights: Mapping[str, Array], regions: Mapping[str, Region], form: Form
    ) -> Arrays:
        """Return the hostile update.

        Args:
            update: Honest update.
            weights: Model that it began from.
            regions: Regions of its tensors.
            form: Its form.

        Raises:
            ConfigError: The update has codes or changes, which would need another encoding.
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
    """Return the weights moved from ``base`` by the negated change, scaled by ``strength``."""
    away = base - np.float32(strength) * (trained - base)
    return np.clip(away, -VALUE_LIMIT, VALUE_LIMIT).astype(trained.dtype)


def _ruin_statistics(name: str, array: Array) -> Array:
    """Return ``array`` if it is trained, otherwise moving statistics at the limits that the validation permits."""
    kind = name.rpartition(".")[2]
    if kind not in ("running_mean", "running_var"):
        return array
    return np.full_like(array, -VALUE_LIMIT if kind == "running_var" else VALUE_LIMIT)


class LocalRounds:
    """Local rounds of clients. ``functions`` implement ``spec``, by tier and index of the exchange."""

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
        """Train the clients of ``portion``, add their updates to ``active``, and return their reports. Call
        :meth:`begin` before.
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
        data = self._data.of(client).fitted(manifest.data, LabelSpec.of(manifest), functions)
        seed = self._task.opened.assignments[client].seed
        return Participant(client, seed, data.first(self._spec.rules.samples), carry)

    def _add_update(self, active: RoundAggregation, client: str, result: RoundResult) -> Report:
        """Encode, validate and add a client's update, and return its report."""
        rules, opened = self._spec.rules, self._task.opened
        task, version = opened.assignments[client], self._task.began.version
        sent = tensors.dump(self._sent_by(active, task, result), result.masks)
        claim = Claim(client, rules.run, task.round, task.nonce, task.tier, version, result.samples)
        try:
            weight = active.weight(weight_of(rules, task, version, claim))
            checked = active.check_sent(task.tier, sent, task.round)
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
        if not self._attack.by(task.device):
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

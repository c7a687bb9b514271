"""The local rounds of clients, from their data to the sums of a round: what every trainer does, wherever it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch

from edgefl.config.simulation import SimulationTable
from edgefl.errors import ConfigError, UpdateRejected
from edgefl.simulator.clients import ClientData
from edgefl.simulator.functions import Functions
from edgefl.simulator.trainers.tasks import Portion, Report, RoundTask
from edgefl.simulator.training import Given, LocalTraining, Participant
from edgefl.wire import tensors
from edgefl.wire.regions import Region, extract
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.form import VALUE_LIMIT, Form, float32_bytes
from edgefl_device.data.rows import Parts
from edgefl_device.data.samples import LabelSpec
from edgefl_device.round.runner import RoundResult
from edgefl_server.coordinator.claims import Claim, weight_of
from edgefl_server.coordinator.fleet import Assignment
from edgefl_server.round_aggregation import RoundAggregation
from edgefl_server.run_spec import RunSpec

# What dishonest clients of a simulation send in place of what they trained, to see what a federation stands.


@dataclass(frozen=True)
class Attack:
    """By the clients that ``table`` calls hostile. Each sends an update that passes every check of its form."""

    table: SimulationTable

    def by(self, client: str) -> bool:
        """Whether it is one of them."""
        return any(fnmatchcase(client, pattern) for pattern in self.table.hostile)

    def sent(
        self, update: Arrays, weights: Mapping[str, Array], regions: Mapping[str, Region], form: Form
    ) -> Arrays:
        """In place of ``update``, which began from the model's ``weights``, of which it holds ``regions``.

        ConfigError for an update of codes or changes, which would have to be coded again.
        """
        if form.sections or form.change:
            raise ConfigError(
                f"simulation.hostile clients send weights, and codec {form.codec!r} sends codes: set codec.name to 'dense'",
                codec=form.codec,
            )
        base = extract(weights, regions)
        if self.table.attack == "flip":
            return {
                name: _flipped(base[name], trained, self.table.strength) for name, trained in update.items()
            }
        return {name: _ruined(name, array) for name, array in update.items()}


def _flipped(base: Array, trained: Array, strength: float) -> Array:
    """The change, turned round and so many times as long."""
    away = base - np.float32(strength) * (trained - base)
    return np.clip(away, -VALUE_LIMIT, VALUE_LIMIT).astype(trained.dtype)


def _ruined(name: str, array: Array) -> Array:
    """Statistics that no norm counts, as far as the checks of an update let them be."""
    kind = name.rpartition(".")[2]
    if kind not in ("running_mean", "running_var"):
        return array
    return np.full_like(array, -VALUE_LIMIT if kind == "running_var" else VALUE_LIMIT)


class LocalRounds:
    """Of the clients in ``data``, with the functions of ``spec`` by tier and number of the exchange."""

    def __init__(
        self,
        spec: RunSpec,
        functions: Mapping[tuple[str, int], Functions],
        data: ClientData,
        together: int,
    ) -> None:
        self._spec = spec
        self._functions = functions
        self._training = {key: LocalTraining(each, together) for key, each in functions.items()}
        self._data = data
        self._attack = Attack(next((each.table for each in functions.values()), SimulationTable()))
        self._given: dict[str, Given] = {}

    def begin(self, task: RoundTask) -> None:
        self._task = task
        self._given = {}

    def train(
        self, active: RoundAggregation, portion: Portion, carries: Mapping[str, Arrays]
    ) -> list[Report]:
        """Train the clients of ``portion`` and add their updates to ``active``, which is of the task that was begun."""
        key = portion.tier, self._spec.index(self._task.opened.position)
        with _one_thread():
            taking = [
                self._participant(client, self._functions[key], carries.get(client, {}))
                for client in portion.clients
            ]
            results = self._training[key].run(self._given_to(portion.tier, self._functions[key]), taking)
            return [self._reported(active, client.name, result) for client, result in results]

    def _given_to(self, tier: str, functions: Functions) -> Given:
        if tier not in self._given:
            # Copies: what came is read-only, and may lie where torch would not have put it.
            arrays, device = self._task.weights[tier], functions.device
            weights = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
            self._given[tier] = Given(weights, self._task.hyper)
        return self._given[tier]

    def _participant(self, client: str, functions: Functions, carry: Arrays) -> Participant:
        manifest = functions.manifest
        parts = Parts(functions.blob, functions.features)
        data = self._data.of(client).fitted(manifest.data, LabelSpec.of(manifest), parts)
        seed = self._task.opened.assignments[client].seed
        return Participant(client, seed, data.first(self._spec.rules.samples), carry)

    def _reported(self, active: RoundAggregation, client: str, result: RoundResult) -> Report:
        """Add a client's update to the round, as it would travel."""
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
    """torch adds in another order with another number of threads: with one, all trainers get the same bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

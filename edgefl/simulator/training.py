"""Local rounds of the clients of a tier, equal to those of :mod:`edgefl_device.round.trainer` on a device.

Batches, noise, passes and facts about the data (:class:`edgefl_device.round.inputs.RoundInputs`) are the same, in
order. The functions run in torch. Clients with the same number of steps are trained together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from edgefl.contract.tensors import Tensors, role_of
from edgefl.errors import BundleError
from edgefl.simulator.functions import Functions
from edgefl.wire.bundle.manifest import FrozenChunk, Graph, PhaseSpec
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import FittedData
from edgefl_device.round.inputs import RoundInputs, carry_inputs, check_complete, other_rows
from edgefl_device.round.trainer import RoundResult, round_result

Metrics = dict[str, float]


@dataclass(frozen=True)
class Participant:
    """Client in a round.

    Attributes:
        name: Name of the client.
        seed: Seed of its task.
        data: Its samples, converted to the model's input.
        carry: State that the algorithm kept on it in an earlier round, by name; empty if there is none.
    """

    name: str
    seed: int
    data: FittedData
    carry: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class TierInputs:
    """Inputs that all clients of a tier share: ``weights`` by the label of the graph input that reads them, on the
    functions' device, and the algorithm's scalars ``hyper`` by name.
    """

    weights: Tensors
    hyper: Mapping[str, float]


class ClientTraining:
    """Local rounds of the clients of a tier with ``functions``. Up to ``together`` clients are trained at a time; 0 for
    as many as suit the functions.

    A group that is not full is filled up with copies of its last client, so that equal groups give equal bits.
    """

    def __init__(self, functions: Functions, together: int = 1) -> None:
        self._functions = functions
        self._manifest = functions.manifest
        self._together = together or functions.together

    def run(
        self, tier_inputs: TierInputs, participants: Sequence[Participant]
    ) -> Iterator[tuple[Participant, RoundResult]]:
        """Train the participants. Yield (participant, its result), grouped by their numbers of steps.

        Raises:
            BundleError: If the weights lack an input of a graph.
            DataError: If the data do not fit the graphs.
        """
        alike: dict[tuple[int, ...], list[Participant]] = {}
        for each in participants:
            alike.setdefault(self._manifest.steps_with(len(each.data)), []).append(each)
        size = 1 if any(phase.shorter for phase in self._manifest.phases) else self._together
        for clients in alike.values():
            for first in range(0, len(clients), size):
                group = clients[first : first + size]
                yield from zip(group, self._round(tier_inputs, group, size), strict=True)

    def _round(self, tier_inputs: TierInputs, group: Sequence[Participant], size: int) -> list[RoundResult]:
        manifest = self._manifest
        filled = [*group, *([group[-1]] * (size - len(group)))]
        feeds = [self._feeds(tier_inputs, each) for each in group]
        feeds += [feeds[-1]] * (size - len(group))
        steps = manifest.steps_with(len(group[0].data))
        total, start, finish = sum(steps), manifest.graph(manifest.start), manifest.graph(manifest.finish)
        begun = [
            carry_inputs(start, each.carry) | fed.shared(start, total)
            for each, fed in zip(filled, feeds, strict=True)
        ]
        state = _state(self._call(start, tier_inputs, begun, {}))
        sums: list[Metrics] = [{} for _ in group]
        position = 0
        for phase, count in zip(manifest.phases, steps, strict=True):
            for step in range(position, position + count):
                graph, batches = self._graph_inputs(phase, feeds, step, position)
                out = self._call(graph, tier_inputs, batches, state)
                state = state | _state(out)
                _add(sums, out)
            position += count
        ended = [
            carry_inputs(finish, each.carry) | fed.shared(finish, total + 1)
            for each, fed in zip(filled, feeds, strict=True)
        ]
        out = self._call(finish, tier_inputs, ended, state)
        return [
            round_result(manifest, _of_client(out, at, size), sums[at], steps, len(each.data))
            for at, each in enumerate(group)
        ]

    def _graph_inputs(
        self, phase: PhaseSpec, feeds: Sequence[RoundInputs], step: int, first: int
    ) -> tuple[Graph, list[Arrays]]:
        """Return (graph of training step ``step``, inputs of each client). ``first``: first step of the phase."""
        whole = self._manifest.graph(phase.graph)
        graph, shorter = whole, None
        if phase.shorter:  # one client at a time
            graph = shorter = self._manifest.graph(phase.graph_for(feeds[0].longest_sample(whole, step)))
        batches = [
            fed.shared(graph, step)
            | (fed.masked_batch(graph, step - first) if phase.over_data else fed.batch(whole, step, shorter))
            for fed in feeds
        ]
        return graph, batches

    def _feeds(self, tier_inputs: TierInputs, client: Participant) -> RoundInputs:
        features = self._record(tier_inputs, client.data).__getitem__ if self._manifest.prefix else None
        return RoundInputs.for_round(self._manifest, client.seed, client.data, tier_inputs.hyper, features)

    def _record(self, tier_inputs: TierInputs, data: FittedData) -> Array:
        """Return the boundary activations, the outputs of the frozen units, with one row per sample of ``data``
        (embracingfl.md, Algorithm 1).
        """
        record: Array | None = None
        for chunk in self._manifest.prefix:
            record = self._forward(chunk, tier_inputs, data, record)
        assert record is not None
        return record

    def _forward(
        self, chunk: FrozenChunk, tier_inputs: TierInputs, data: FittedData, before: Array | None
    ) -> Array:
        spec, rows = self._manifest.graph(chunk.graph), len(data)
        (flowing,) = (port for port in spec.inputs_of("batch") if port.label == "0.x")
        others = [port for port in spec.inputs_of("batch") if port is not flowing]
        group, parts = flowing.shape[0], []
        for start in range(0, rows, group):
            # The last group is filled by wrap-around: batch statistics need a full one.
            indices = np.arange(start, start + group) % rows
            batch = {each.name: other_rows(data, each, indices) for each in others}
            batch[flowing.name] = data.rows(indices) if before is None else before[indices]
            out = self._call(spec, tier_inputs, [batch], {})
            parts.append(out["record.x"].cpu().numpy()[: min(group, rows - start)])
        return np.ascontiguousarray(np.concatenate(parts))  # torch may have put the channels innermost

    def _call(self, graph: Graph, tier_inputs: TierInputs, own: Sequence[Arrays], state: Tensors) -> Tensors:
        """Run ``graph`` once for all clients, and return its outputs by name. For several clients they have a client
        dimension.

        Args:
            graph: Graph to run.
            tier_inputs: Inputs that all clients share.
            own: Inputs of each client.
            state: Training state, with a client dimension for several clients.

        Raises:
            BundleError: The weights lack an input of the graph.
        """
        inputs: Tensors = {}
        for port in graph.inputs_of("weights"):
            if port.label not in tier_inputs.weights:
                raise BundleError(
                    f"graph {graph.name!r} reads {port.label!r}, which the round's weights do not hold",
                    port=port.name,
                )
            inputs[port.name] = tier_inputs.weights[port.label]
        for port in graph.inputs_of("state"):
            inputs[port.name] = state[port.name]
        # Of these only the names are looked at.
        held: Arrays = dict.fromkeys(inputs, np.zeros(0))
        many = len(own) > 1
        check_complete(graph, {**own[0], **held})
        for port in graph.inputs:
            if port.name not in inputs:
                arrays = [each[port.name] for each in own]
                common = not many or port.role == "hyper"
                whole = np.asarray(arrays[0]) if common else np.stack(arrays)
                inputs[port.name] = torch.from_numpy(whole).to(self._functions.device)
        return self._functions.record_function(graph.name, len(own))(inputs)


def _state(out: Tensors) -> Tensors:
    return {name: tensor for name, tensor in out.items() if role_of(name) == "state"}


def _add(sums: list[Metrics], out: Mapping[str, Tensor]) -> None:
    for name, tensor in out.items():
        if role_of(name) == "metric":
            label = name.partition(".")[2]
            for own, value in zip(sums, tensor.reshape(-1).tolist(), strict=False):
                own[label] = own.get(label, 0.0) + value


def _of_client(out: Tensors, at: int, size: int) -> Arrays:
    return {
        name: (tensor[at] if size > 1 else tensor).contiguous().cpu().numpy() for name, tensor in out.items()
    }

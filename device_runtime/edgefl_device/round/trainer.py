"""Local training of one round, for any manifest: works with graphs, roles and ports, not with particular algorithms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.tensors import Array, Arrays
from edgefl_device.data.samples import FittedData
from edgefl_device.engine.base import LoadedGraph, State
from edgefl_device.host import trim_memory
from edgefl_device.round.control import RoundControl, StepProgress
from edgefl_device.round.forward import MultiStepForward, record_tag
from edgefl_device.round.graph_loader import GraphLoader, RoundStore, arrays_of_role
from edgefl_device.round.inputs import RoundInputs, carry_inputs, check_complete
from edgefl_device.round.job import Job
from edgefl_device.store.database import Checkpoint

NO_CHECKPOINTS = 1 << 30
"""Steps between two checkpoints of a round that keeps none but the last."""


@dataclass(frozen=True, repr=False)
class RoundResult:
    """Result of a round: arrays by name, with the shapes and dtypes of the bundle's ports.

    Attributes:
        update: Arrays that are sent to the server.
        masks: Number of bits of each array of the update that holds packed bits, by name.
        carry: Arrays that stay on the device for the next round.
        metrics: Means over the steps that report them, and those of ``finish`` unchanged.
        samples: Number of local rows used.
    """

    update: Arrays
    masks: dict[str, int]
    carry: Arrays
    metrics: dict[str, float]
    samples: int

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in self.metrics.items())
        return (
            f"RoundResult({metrics or 'no metrics'}, {self.samples} samples, {_count_text(self.update)} in the update, "
            f"{_count_text(self.carry)} kept)"
        )


class LocalTrainer:
    """Trainer that runs the rounds of one bundle on local data.

    Args:
        loader: Loader of the bundle's graphs and of the round's weights.
        store: Storage of checkpoints. With the same storage, a killed round resumes at its last checkpoint.
        folder: Folder for the stored activations of frozen units.
        checkpoint_steps: Steps between two checkpoints.
    """

    def __init__(
        self, loader: GraphLoader, store: RoundStore, folder: Path, checkpoint_steps: int = NO_CHECKPOINTS
    ) -> None:
        self.loader = loader
        self._store = store
        self._checkpoint_steps = checkpoint_steps
        self._forward = MultiStepForward(loader, store, folder)

    def train(
        self, job: Job, data: FittedData, carry: Arrays, control: RoundControl, carry_origin: str = ""
    ) -> RoundResult:
        """Run one round.

        Args:
            job: The task, and the blobs of its weights.
            data: The local samples, fitted to the bundle; the task may use fewer of them.
            carry: Arrays that an earlier round left, by label; missing ones are zeros.
            control: Ends the round, and receives its steps.
            carry_origin: Name of the carry. A checkpoint that began with another one, or with other rows, is ignored.

        Returns:
            The update, the new carry and the metrics.

        Raises:
            RoundAborted: The round was cancelled.
            RoundDeclined: ``control`` or the disk does not let the round continue.
            BundleError: Graphs, weights and ports disagree.
            DataError: The samples do not fit a batch.
        """
        loader, profiler, engine = self.loader, self.loader.profiler, self.loader.engine
        manifest = loader.manifest
        data = data.first(job.samples)

        # -- Forward: the frozen units run once over all rows. From here on the record replaces the samples.
        record = self._forward.record(job, data, control) if manifest.prefix else None
        features = None if record is None else partial(record.rows, version=record_tag(job))
        inputs = RoundInputs.for_round(manifest, job.seed, data, job.hyper, features)
        phase_steps = manifest.steps_with(len(data))
        total = sum(phase_steps)
        basis = f"{len(data)} rows, carry {carry_origin}"
        state: State = {}
        sums: dict[str, float] = {}
        done = 0

        try:
            # -- Start: the state of a checkpoint, or a new one from the round's weights.
            saved = self._store.checkpoint(job.nonce)
            if saved is not None and saved.basis == basis:
                done, sums = saved.step, dict(saved.sums)
                # One by one, in a scope of its own: memory holds one copy of a tensor at a time.
                state = {
                    key: value
                    for name, array in saved.tensors
                    for key, value in engine.write_state({name: array}).items()
                }
            else:
                spec = manifest.graph(manifest.start)
                feeds = self._weights_and_carry(job, manifest.start, carry) | inputs.shared(spec, total)
                state = loader.run_once(spec.name, check_complete(spec, feeds, ()), {}).state
                del feeds
                trim_memory()  # the weights: small tensors leave gaps that the next graph does not fit into

            # -- Steps: each phase runs its graph, or the one for the longest sample of the batch.
            first = 0
            for phase, count in zip(manifest.phases, phase_steps, strict=True):
                graphs: dict[str, LoadedGraph] = {}
                whole = manifest.graph(phase.graph)
                for step in range(max(first, done), first + count):
                    control.check()
                    spec = whole
                    if phase.shorter:
                        spec = manifest.graph(phase.graph_for(inputs.longest_sample(whole, step)))
                    feeds = inputs.shared(spec, step)
                    if phase.over_data:
                        feeds |= inputs.masked_batch(spec, step - first)
                    else:
                        feeds |= inputs.batch(whole, step, spec)
                    check_complete(spec, feeds, state)
                    if spec.name not in graphs:
                        loader.variants.tune(spec, feeds, state, control)
                        graphs[spec.name] = loader.load(spec.name)
                    with profiler.timed("step"):
                        outputs = graphs[spec.name].run(feeds, state)
                    step_ms = profiler.last_ms("step")
                    control.worked(step_ms)
                    for metric, value in arrays_of_role(outputs.arrays, "metric").items():
                        sums[metric] = sums.get(metric, 0.0) + float(value)
                    made = _steps_made(phase_steps, step + 1)
                    loss = mean_metrics(manifest, sums, made).get("loss", float("nan"))
                    control.report(StepProgress("train", step + 1, total, loss, step_ms))
                    state = {**state, **outputs.state}
                    del feeds, outputs  # or the next step's batch is made while they exist
                    if (step + 1) % self._checkpoint_steps == 0 or step + 1 == total:
                        checkpoint = Checkpoint(step + 1, dict(sums), self._tensors(state), basis)
                        self._store.save_checkpoint(job.nonce, checkpoint)
                if graphs:
                    graphs.clear()
                    trim_memory()
                first += count
        finally:
            if record is not None:
                record.close()

        # -- Finish: the update and the next carry, from the round's weights and the final state.
        spec = manifest.graph(manifest.finish)
        feeds = self._weights_and_carry(job, manifest.finish, carry) | inputs.shared(spec, total + 1)
        arrays = loader.run_once(spec.name, check_complete(spec, feeds, state), state).arrays
        if record is not None:
            record.delete()
        return round_result(manifest, arrays, sums, phase_steps, len(data))

    def _weights_and_carry(self, job: Job, graph: str, carry: Arrays) -> Arrays:
        """Return the inputs of ``graph`` with roles ``weights`` (downloaded if needed) and ``carry`` (state of an
        earlier round).
        """
        spec = self.loader.manifest.graph(graph)
        feeds: Arrays = {}
        if spec.inputs_of("weights"):
            feeds = self.loader.weight_inputs(
                spec, self.loader.fetch_weights(job, self.loader.manifest.suffix)
            )
        return feeds | carry_inputs(spec, carry)

    def _tensors(self, state: State) -> Iterator[tuple[str, Array]]:
        """Yield (name, array) of each tensor of the state; they are read from the engine one by one to save memory."""
        for name, value in state.items():
            yield from self.loader.engine.read_state({name: value}).items()


def round_result(
    manifest: Manifest, arrays: Arrays, sums: Mapping[str, float], steps: Sequence[int], samples: int
) -> RoundResult:
    """Return the result of a round from its last outputs and the sums of its metrics.

    Args:
        manifest: The bundle's manifest.
        arrays: Outputs of its ``finish`` graph, by port name.
        sums: Sums of the metrics over all steps, by name.
        steps: Number of steps made in each phase.
        samples: Number of local rows used.
    """
    update = manifest.graph(manifest.finish).outputs_of("update")
    last = {name: float(value) for name, value in arrays_of_role(arrays, "metric").items()}
    return RoundResult(
        update=arrays_of_role(arrays, "update"),
        masks={port.label: port.mask for port in update if port.mask},
        carry=arrays_of_role(arrays, "carry"),
        metrics=mean_metrics(manifest, sums, steps) | last,
        samples=samples,
    )


def mean_metrics(manifest: Manifest, sums: Mapping[str, float], steps: Sequence[int]) -> dict[str, float]:
    """Return the mean of each metric, by name, over the steps whose graph reports it.

    Args:
        manifest: The bundle's manifest.
        sums: Sums of the metrics over all steps, by name.
        steps: Number of steps made in each phase.
    """
    reporting = dict.fromkeys(sums, 0)
    for phase, made in zip(manifest.phases, steps, strict=True):
        for label in {port.label for port in manifest.graph(phase.graph).outputs_of("metric")} & sums.keys():
            reporting[label] += made
    return {name: total / max(1, reporting[name]) for name, total in sums.items()}


def _steps_made(steps: Sequence[int], done: int) -> list[int]:
    """Return the number of steps made in each phase, if ``done`` steps are made in total and phases run one after another.

    ``steps`` has the planned number of steps of each phase.
    """
    made = []
    for count in steps:
        made.append(min(count, done))
        done -= made[-1]
    return made


def _count_text(arrays: Mapping[str, Array]) -> str:
    return f"{len(arrays)} array{'s' * (len(arrays) != 1)}"

"""Simulated federations: the same rounds as over a broker, in one process, in several, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from edgefl.analysis.curves import curves
from edgefl.api.federation import load_federation
from edgefl.api.progress import curves_of, planned_rounds, reporting, round_rows, round_text
from edgefl.config import Federation, load
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError
from edgefl.lab.run_folder import without_password
from edgefl.models.user_factory import refuse_while_loading
from edgefl.setup.data import open_data, own_data, partition
from edgefl.setup.processor import processor
from edgefl.setup.runs import held, with_absolute_paths
from edgefl.setup.tiers import completed, device_names
from edgefl.setup.training import update_sizes
from edgefl.simulator.clients import ClientData, ClientFiles, SharedData, SimulatedFleet
from edgefl.simulator.downlink import SimulatedDownlink
from edgefl.simulator.folder import (
    CONFIG_NAME,
    MODEL_NAME,
    ROUNDS_NAME,
    SimulationFolder,
    check,
    discard,
    kept_models,
    rows_of,
)
from edgefl.simulator.functions import SimulationPlan
from edgefl.simulator.results import RoundRow
from edgefl.simulator.rounds import RUN, SimulatedRounds
from edgefl.simulator.trainers.pool import trainers
from edgefl.system.files import write_text
from edgefl.tracking.session import Tracking, check_tracking
from edgefl.tracking.trackers import TrackedFile
from edgefl.wire import tensors
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import notebook_table
from edgefl_server.events import Event, Noted, Warned
from edgefl_server.workers.ray_cluster import LOCAL

_LOCK = "simulate.lock"
_CURVES = (
    *("round", "accuracy", "loss", "train_loss", "reports", "up_bytes", "down_bytes"),
    *("seconds", "simulated_s", "energy_j"),
)


@dataclass(frozen=True)
class Simulation:
    """Results of a simulation, read from its ``folder``. Cached attributes keep what they read first."""

    folder: Path

    @cached_property
    def federation(self) -> Federation:
        """Federation that was simulated."""
        return load(self.folder / CONFIG_NAME)

    @property
    def finished(self) -> bool:
        """True if all rounds are over."""
        return (self.folder / MODEL_NAME).is_file()

    @cached_property
    def history(self) -> tuple[RoundRow, ...]:
        """Finished rounds of the simulation, in order. Accuracy and loss are None for a round that was not evaluated."""
        return rows_of(self.folder)

    @cached_property
    def curves(self) -> Mapping[str, Array]:
        """The history as arrays, float64 (rounds,), with NaN for missing values.

        Names are ``round``, ``accuracy``, ``loss``, ``train_loss``, ``reports``, ``up_bytes``, ``down_bytes``,
        ``seconds``, ``simulated_s``, ``energy_j``, and those of the metrics. Evaluation rounds add
        ``devices.accuracy``, ``devices.accuracy.median``, ``devices.accuracy.worst_decile``, ``tier.NAME.accuracy``, and
        the same of other metrics.
        """
        return curves_of(self.history, _CURVES)

    @cached_property
    def model(self) -> Arrays:
        """Trained weights of the finished simulation, float arrays by global name.

        Raises:
            ConfigError: the last round is not over.
        """
        if not self.finished:
            raise ConfigError(
                f"the simulation in {self.folder} is not finished: `resume` continues it",
                path=str(self.folder),
            )
        return tensors.load((self.folder / MODEL_NAME).read_bytes())

    @property
    def kept(self) -> Mapping[int, Path]:
        """Files of the models that were kept (setting ``simulation.keep_every``), by number of the round; {} by default."""
        return kept_models(self.folder)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"Simulation({str(self.folder)!r}, {len(self.history)} rounds, {state})"

    def _repr_html_(self) -> str:
        return notebook_table(repr(self), round_rows(self.history))


class _WarningListener:
    """Listener that passes warnings and notes to the user's function ``warn``."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn

    def emit(self, event: Event) -> None:
        if isinstance(event, Warned | Noted):
            self._warn(event.text)


@dataclass(frozen=True)
class PreparedSimulation:
    """Prepared simulation; call :meth:`run` or :meth:`rounds` once.

    Attributes:
        federation: The federation, with all defaults filled in.
        dataset: Training and test samples.
        clients: Samples of each client.
        folder: Folder for the results.
        resume: True: continue the simulation in ``folder`` if there is one.
        device: Processor that sums updates and evaluates the model.
    """

    federation: Federation
    dataset: Dataset
    clients: ClientData
    folder: Path
    resume: bool
    device: str

    def run(
        self,
        watch: Callable[[RoundRow], None] = lambda _: None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> Simulation:
        """Simulate all remaining rounds, write their charts into the folder, and return the results.

        After a KeyboardInterrupt, a new simulation of the folder with ``resume`` continues.

        Args:
            watch: Called with each finished round.
            progress: Called with a text before each longer part.
            warn: Called with each warning.

        Raises:
            StoreError: another process simulates in the folder.
        """
        for row in self.rounds(progress=progress, warn=warn):
            watch(row)
        ended = Simulation(self.folder)
        title = self.federation.federation.name
        for name, picture in curves(ended.history, title, self.dataset.classes).items():
            write_text(self.folder / f"{name}.svg", picture)
        return ended

    def rounds(
        self,
        *,
        progress: Callable[[str], None] = lambda _: None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> Iterator[RoundRow]:
        """Simulate the remaining rounds, and yield each one when it is finished. Locks the folder until the iterator ends.

        Args:
            progress: Called with a text before each longer part.
            warn: Called with each warning.

        Raises:
            StoreError: another process simulates in the folder.
        """
        lock = held(self.folder, _LOCK, "simulation")
        try:
            folder = SimulationFolder.open(self.folder, self.federation, resume=self.resume)
            try:
                yield from self._rounds(folder, progress, warn)
            finally:
                folder.carries.close()
        finally:
            lock.release()

    def _rounds(
        self, folder: SimulationFolder, progress: Callable[[str], None], warn: Callable[[str], None]
    ) -> Iterator[RoundRow]:
        listener = _WarningListener(warn)
        plan = SimulationPlan.of(
            self.federation, self.dataset, listener=listener, progress=progress, device=self.device
        )
        with closing(trainers(plan, self.federation, self.dataset, self.clients)) as chosen:
            rounds = SimulatedRounds(
                plan.spec,
                plan.functions,
                self.clients,
                SimulatedDownlink(plan.spec, self.folder, RUN),
                folder.carries,
                chosen,
                fleet=SimulatedFleet(self.federation.simulation, self.federation.federation.seed),
                update_bytes={
                    tier: size.nbytes for tier, size in update_sizes(self.federation, self.dataset).items()
                },
                together=self.federation.simulation.together,
                device=self.device,
                listener=listener,
            )
            left = rounds.run(folder.weights(plan.spec), folder.standing, resumed=folder.resumed)
            tags = {"dataset": self.dataset.name}
            tracking = Tracking.open(self.federation, self.folder, ROUNDS_NAME, RoundRow, tags)
            try:
                with tracking:
                    for row in folder.write(plan.spec, left):
                        tracking.notify()
                        for text in tracking.problems():
                            warn(text)
                        yield row
                    tracking.add_file(TrackedFile(self.folder / MODEL_NAME, "model"))
            finally:
                for text in tracking.problems():
                    warn(text)
        if plan.spec.caveat:  # once more beside the result
            warn(plan.spec.caveat)


def prepare_simulation(
    federation: Federation | str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    fresh: bool = False,
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
) -> PreparedSimulation:
    """Return a simulation in the folder ``out`` that is ready to run: read the data and spread them over the clients.

    Args:
        federation: objects, or their file.
        out: folder of the simulation.
        resume: continue the simulation in ``out``.
        fresh: discard the simulation in ``out``, at once.
        device: processor that sums updates and evaluates the model, ``auto``, ``cpu`` or ``cuda``.
        workers: processes that train clients; None: as the table ``simulation`` says.
        ray: address of a Ray cluster whose actors are the workers, or ``local``; None: as the table says.

    Raises:
        ConfigError: ``out`` holds another simulation, or one that cannot be resumed, or the federation cannot be used.
        DataError: the data are missing.
    """
    refuse_while_loading("start a simulation")
    processor(device)  # now, not once the data are read
    read = federation if isinstance(federation, Federation) else load_federation(federation)
    whole = _with_workers(without_password(with_absolute_paths(completed(read))), workers, ray)
    folder = Path(out).resolve()
    if resume and fresh:
        raise ConfigError("`resume` continues a simulation and `fresh` discards it: give one of them")
    check_tracking(whole, None if fresh else folder)
    elsewhere = whole.simulation.ray not in ("", LOCAL)
    if whole.simulation.device == "cuda" and not elsewhere and not torch.cuda.is_available():
        raise ConfigError(
            "simulation.device is cuda, which needs an NVIDIA GPU and a torch that can use it, and torch finds none here; "
            "choose cpu",
            device="cuda",
        )
    dataset = open_data(whole)
    names = device_names(whole)
    own = own_data(whole, names)
    clients: ClientData = (
        ClientFiles(own)
        if own
        else SharedData(dataset, dict(zip(names, partition(whole, dataset, len(names)), strict=True)))
    )
    if fresh and folder.exists():
        lock = held(folder, _LOCK, "simulation")
        try:
            discard(folder)
        finally:
            lock.release()
    if resume and whole.round.mode == "buffered" and folder.exists():
        raise ConfigError(
            "a simulation with round.mode buffered cannot be taken up, as its clients are in the midst of several versions: "
            "begin it anew (`fresh`)"
        )
    check(folder, whole, resume=resume)
    return PreparedSimulation(whole, dataset, clients, folder, resume, device)


def _with_workers(federation: Federation, workers: int | None, ray: str | None) -> Federation:
    """Return a copy of the federation with ``workers`` and ``ray`` in its table ``simulation``.

    None keeps a value; ``ray`` "" means a cluster that is started for the simulation.

    Raises:
        ConfigError: ``workers`` is below 1.
    """
    if workers is not None and workers < 1:
        raise ConfigError(f"simulation.workers is {workers}; choose 1 or more", workers=workers)
    chosen = {"workers": workers, "ray": None if ray is None else ray or LOCAL}
    given = {key: value for key, value in chosen.items() if value is not None}
    return federation.model_copy(update={"simulation": federation.simulation.model_copy(update=given)})


def simulate(
    federation: Federation | str | Path,
    out: str | Path = "simulations/latest",
    *,
    resume: bool = False,
    fresh: bool = False,
    device: str = "auto",
    workers: int | None = None,
    ray: str | None = None,
    watch: Callable[[RoundRow], None] | None = None,
) -> Simulation:
    """Train a federation in torch on this machine, without broker and devices. Nothing is compiled.

    Algorithms, submodels, codecs, batches, noise and sums equal those of :func:`edgefl.run`.

    Args:
        federation: objects (:func:`edgefl.federation`), or their file.
        out: folder of the simulation.
        resume: continue the simulation that was stopped in ``out``, with the same bits; start one if there is
            none.
        fresh: discard an earlier simulation in ``out``.
        device: processor that sums updates and evaluates the model, ``auto``, ``cpu`` or ``cuda``.
        workers: processes that train clients; None: as the table ``simulation`` says. Their number changes no
            bit.
        ray: address of a Ray cluster whose actors are the workers; ``local``: one that is started for the
            simulation; None: as the table says.
        watch: called with each round when it is finished; by default a line in a terminal or a notebook shows the
            progress.

    Returns:
        The finished simulation, which reads its results from the folder.

    Raises:
        ConfigError: the federation cannot be used, or ``out`` holds another simulation.
        DataError: the data are missing.
        StoreError: another process simulates in ``out``.
        ParticipationError: the algorithm needs clients that the federation lacks.
    """
    prepared = prepare_simulation(
        federation, out, resume=resume, fresh=fresh, device=device, workers=workers, ray=ray
    )
    if watch:
        return prepared.run(watch)
    with reporting(
        "building the functions", total=planned_rounds(prepared.federation, prepared.dataset)
    ) as report:
        return prepared.run(lambda row: report(round_text(row), row.round), progress=report)

"""Federations that run on this machine as processes, and the results in their folders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from edgefl.api.federation import load_federation
from edgefl.api.progress import curves_of, planned_rounds, reporting, round_rows
from edgefl.api.serve import SERVER_LOCK
from edgefl.config import Federation, load
from edgefl.data.dataset import Dataset
from edgefl.errors import ConfigError, ParticipationError
from edgefl.lab.agents import deal_agents, with_agents
from edgefl.lab.deployment import DeploymentBuilder
from edgefl.lab.lab import Lab, Restart, ServerEvent, discard, refuse_foreign
from edgefl.lab.run_folder import CONFIG_NAME, MODEL_NAME, measured_statistics, weights_of
from edgefl.models.user_factory import refuse_while_loading
from edgefl.setup.data import open_data, own_data, partition
from edgefl.setup.runs import held, with_absolute_paths
from edgefl.setup.tiers import completed, device_names
from edgefl.setup.training import update_sizes
from edgefl.system.files import FolderLock
from edgefl.tracking.session import check_tracking
from edgefl.wire.statistics import StatisticsRequest
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import notebook_table
from edgefl.wire.update.form import UpdateSize
from edgefl_device.round.offline import read_weights
from edgefl_export.compiler.compiler import check_installed
from edgefl_server.events import DeviceEvaluation, RoundClosed
from edgefl_server.storage.audit import rounds_of

_CURVES = ("accuracy", "loss", "train_loss", "seconds", "up_bytes", "down_bytes", "reports")

News = ServerEvent | Restart
"""What a run tells: an event of the server as plain values, or that a process died and runs again."""


@dataclass(frozen=True)
class Run:
    """Results of a run, read from its ``folder``.

    Cached attributes keep what they read first, also if the run continues.
    """

    folder: Path

    @property
    def path(self) -> Path:
        """Path of the file of the federation that was run."""
        return self.folder / CONFIG_NAME

    @cached_property
    def federation(self) -> Federation:
        """Federation that was run."""
        return load(self.path)

    @property
    def weights(self) -> Path:
        """Path of the file of the trained model; of an unfinished run, of the newest checkpoint.

        Raises:
            ConfigError: there is none yet.
        """
        return weights_of(self.folder)

    @cached_property
    def model(self) -> Arrays:
        """Trained weights, float arrays by global name (``<unit>.<tensor>``), without arrays that only the server uses.

        :meth:`state_dict` has the names of your own module.
        """
        held = read_weights(self.weights)
        return {
            name: array for name, array in held.items() if "/" not in name
        }  # c/head.weight is the server's

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trained weights by the names of your own module, float tensors on the CPU.

        Use ``make().load_state_dict(run.state_dict())``, where ``make`` is the factory of the model. Weights and
        batch norm statistics are those with which accuracy is reported: see :func:`edgefl.deploy`. Integer buffers
        and tensors that forward never uses are left out; load with ``strict=False`` if the module has such. The model
        is built again.

        Raises:
            DataError: the run's data, which give the shape of a sample, do not exist any more.
        """
        measured = measured_statistics(self.weights, self.federation)
        builder = DeploymentBuilder.of(
            self.federation, open_data(self.federation), self.model, measured=measured
        )
        names, weights = builder.spec.global_names, builder.whole
        unnamed = {name: name for name in self.model if name not in names.values()}
        return {own: torch.tensor(weights[name]) for own, name in (unnamed | dict(names)).items()}

    @property
    def finished(self) -> bool:
        """True if all rounds are over, so that the folder has the final model."""
        return (self.folder / MODEL_NAME).is_file()

    @cached_property
    def history(self) -> tuple[RoundClosed, ...]:
        """Finished rounds of the run, in order.

        A round has accuracy and loss of the global model on the test set, or None if it was not evaluated. ``metrics``
        has all metrics by name (accuracy and f1, perplexity, mae, ...). Others are the mean training loss, seconds,
        and bytes.
        """
        return rounds_of(self.folder)

    @cached_property
    def curves(self) -> Mapping[str, Array]:
        """The history as arrays, float64 (rounds,), with NaN for missing values.

        Names are ``round``, ``accuracy``, ``loss``, ``train_loss``, ``seconds``, ``up_bytes``, ``down_bytes``, ``reports``,
        and those of the run's metrics. Evaluation rounds add ``devices.accuracy``, ``devices.accuracy.median``,
        ``devices.accuracy.worst_decile``, ``tier.NAME.accuracy``, and the same of other metrics. ``seconds`` include pauses
        in which the run was stopped.
        """
        return curves_of(self.history, ("round", *_CURVES))

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"Run({str(self.folder)!r}, {len(self.history)} rounds, {state})"

    def _repr_html_(self) -> str:
        return notebook_table(repr(self), round_rows(self.history))


def load_run(folder: str | Path) -> Run:
    """Return the run in ``folder``, finished or not.

    Raises:
        ConfigError: it is not the folder of a run.

    >>> edgefl.load_run("no-such-folder")
    Traceback (most recent call last):
    edgefl.errors.ConfigError: no-such-folder is not the folder of a run (no run.toml); name what `out` was
    """
    path = Path(folder)
    if not (path / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{path} is not the folder of a run (no {CONFIG_NAME}); name what `out` was", path=str(path)
        )
    return Run(path)


@dataclass(frozen=True)
class PreparedRun:
    """Run with a complete folder, before its processes start.

    Attributes:
        lab: The folder, and the processes to start.
        dataset: The data of the run.
        updates: Sizes of an update, by tier.
        lock: Lock of the folder, which :meth:`train` releases.
    """

    lab: Lab
    dataset: Dataset
    updates: Mapping[str, UpdateSize]
    lock: FolderLock

    @property
    def federation(self) -> Federation:
        return self.lab.federation

    def train(self, watch: Callable[[News], None] = lambda _: None) -> Run:
        """Start the processes, pass each event to ``watch``, and return the results when all rounds are over.

        Stops all processes and releases the folder's lock in every case, so call it once. After an interruption,
        ``prepare`` and ``train`` resume the run.

        Raises:
            ParticipationError: the server ended before all rounds were over.
            EdgeflError: a process cannot continue.
        """
        try:
            self.lab.start()
            for news in self.lab.events():
                watch(news)
            self.lab.finish()
        finally:
            self.lab.stop()
            self.lock.release()
        run = Run(self.lab.folder)
        if not run.finished:
            raise ParticipationError(
                f"the server ended before all rounds were over; what was trained is in {run.folder}, and the "
                "same call resumes it",
                folder=str(run.folder),
            )
        return run


def prepare(
    federation: Federation | str | Path,
    out: str | Path,
    *,
    fresh: bool = False,
    agents: Mapping[str, int] | None = None,
    evaluate: bool = False,
    statistics: StatisticsRequest | None = None,
) -> PreparedRun:
    """Write the folder of a run and lock it: its configuration and each device's data, unless devices have their own.

    Return the run, which :meth:`PreparedRun.train` starts. If the federation cannot be trained, no folder is left behind.

    Args:
        federation: objects, or their file.
        out: folder of the run.
        fresh: discard an earlier run in ``out``.
        agents: number of devices of each kind, ``{"python": 2, "cpp": 1, "web": 1}``; None for the tiers' counts.
        evaluate: prepare one more evaluation round of the finished run in ``out``.
        statistics: prepare a round that asks for statistics of the devices' data, and trains nothing.

    Raises:
        ConfigError: ``out`` holds another run or the devices' own data, or an agent is not built.
        StoreError: another process trains in ``out``.
        ModelError: model and tiers do not fit.
        DataError: the dataset's files are missing.
    """
    refuse_while_loading("start a run")
    read = federation if isinstance(federation, Federation) else load_federation(federation)
    counts = agents or {}
    whole = with_absolute_paths(completed(with_agents(read, counts) if counts else read))
    check_installed(format for tier in whole.tiers for format in whole.formats_of(tier))
    folder = Path(out).resolve()
    check_tracking(whole, None if fresh else folder)
    dataset = open_data(whole)
    updates = update_sizes(whole, dataset)
    devices = device_names(whole)
    own = own_data(whole, devices)
    if any(folder in path.parents for path in own.values()):
        raise ConfigError(
            f"{whole.data.devices_dir} (data.devices_dir) lies in {folder}, which the run writes and `fresh` empties: "
            "use another `out`"
        )
    parts = [] if own else partition(whole, dataset, len(devices))
    if fresh:
        refuse_foreign(folder)
    lock = held(folder, "run.lock", "run")
    try:
        with ExitStack() as made_ready:
            made_ready.callback(held(folder, SERVER_LOCK, "server").release)
            if fresh:
                discard(folder)
            lab = Lab(whole, folder, agents=deal_agents(devices, counts))
            lab.prepare(dataset, parts, evaluate=evaluate, statistics=statistics)
    except BaseException:
        lock.release()
        raise
    return PreparedRun(lab, dataset, updates, lock)


def run(
    federation: Federation | str | Path,
    out: str | Path = "runs/latest",
    *,
    fresh: bool = False,
    agents: Mapping[str, int] | None = None,
    watch: Callable[[News], None] | None = None,
) -> Run:
    """Train a federation on this machine: a broker, a server and its devices, each a process of its own.

    Args:
        federation: objects (:func:`edgefl.federation`), or their file.
        out: folder of the run; a run that was stopped there is resumed.
        fresh: discard an earlier run in ``out``.
        agents: number of devices of each kind, ``{"python": 2, "cpp": 2, "web": 2}``; None for the tiers' counts.
        watch: called with each event in the calling thread; ``print`` shows it. An event of the server has a
            dictionary ``event``, such as ``{"event": "roundclosed", "round": 1, "accuracy": 0.4, ...}``. By default a
            line in a terminal or a notebook shows the progress.

    Returns:
        The finished run, which reads its results from the folder.

    Raises:
        ConfigError: the federation cannot be used, or ``out`` holds a run of another federation.
        StoreError: another process trains in ``out``.
        ParticipationError: the server ended before all rounds were over.
        EdgeflError: a process cannot continue.
    """
    if watch:
        return prepare(federation, out, fresh=fresh, agents=agents).train(watch)
    with reporting("reading the data and looking at the tiers"):
        prepared = prepare(federation, out, fresh=fresh, agents=agents)
    with reporting("starting the processes", total=planned_rounds(prepared.federation)) as report:
        return prepared.train(
            lambda news: report.report_event(news.event) if isinstance(news, ServerEvent) else None
        )


def evaluate(out: str | Path, watch: Callable[[News], None] | None = None) -> DeviceEvaluation:
    """Evaluate the model of a finished run once more on the rows that its devices hold out, on this machine.

    Args:
        out: folder of the run.
        watch: called with each event in the calling thread; by default a line in a terminal or a notebook shows the
            progress.

    Returns:
        The result of the evaluation round.

    Raises:
        ConfigError: the run is not finished, or its devices hold out no rows.
        ParticipationError: no device reported.
        EdgeflError: a process cannot continue.
    """
    trained = load_run(out)
    if not trained.federation.evaluate.split:
        raise ConfigError(
            f"the devices of the run in {trained.folder} trained on all of their rows: train with split = 0.2 in the table "
            "[evaluate]",
            path=str(trained.folder),
        )
    if not trained.finished:
        raise ConfigError(
            f"the run in {trained.folder} is not finished: `edgefl run --out {trained.folder}` continues it",
            path=str(trained.folder),
        )
    with reporting("reading the data and looking at the tiers"):
        prepared = prepare(trained.path, trained.folder, evaluate=True)
    if watch:
        ended = prepared.train(watch)
    else:
        with reporting("starting the processes") as report:
            ended = prepared.train(
                lambda news: report.report_event(news.event) if isinstance(news, ServerEvent) else None
            )
    last = ended.history[-1]
    if last.evaluation is None:
        raise ParticipationError(
            f"no device evaluated the model: {last.text or 'start it again'}", round=last.round
        )
    return last.evaluation

"""Federations run: on this machine as processes, or a server for devices elsewhere; and what a run leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from device_runtime.round.offline import read_weights
from edgefl.api.federation import load_federation
from edgefl.api.places import found_from_anywhere, held
from edgefl.config import Federation, load
from edgefl.config.broker import REACHED_BY
from edgefl.config.text import changes, dump
from edgefl.data.dataset import Dataset
from edgefl.lab.lab import (
    CONFIG_NAME,
    PASSWORD,
    Lab,
    Restarted,
    Said,
    discard,
    refuse_foreign,
    without_password,
)
from edgefl.models.user_factory import refuse_while_loading
from edgefl.setup.data import open_data, own_data, partition
from edgefl.setup.digests import UNDECIDING
from edgefl.setup.model import federation_model
from edgefl.setup.tiers import completed, device_names
from edgefl.setup.updates import update_sizes
from edgefl.system.files import write_text
from edgefl.system.folder_lock import FolderLock
from edgefl.wire import folders
from edgefl.wire.bundle.signatures import Signer
from edgefl.wire.errors import ConfigError, ParticipationError
from edgefl.wire.mqtt.address import Address
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.update.size import UpdateSize
from exporters.bundle.formats import check_installed
from server.compose import compose
from server.events import Event, RoundClosed
from server.rounds import AnotherConfiguration
from server.service import Service
from server.shards.hiring import workers_of
from server.storage.audit import Audit
from server.storage.feed import Feed
from server.storage.history import History, rounds_of

MODEL_NAME = "model.safetensors"
_SERVER_LOCK = "serve.lock"
_CURVES = ("accuracy", "loss", "train_loss", "seconds", "up_bytes", "down_bytes", "reports")

News = Said | Restarted
"""What a run tells: an event of the server as plain values, or that a process died and runs again."""


@dataclass(frozen=True)
class Run:
    """A run's folder, read."""

    folder: Path

    @property
    def path(self) -> Path:
        """The file of its federation, as it was run."""
        return self.folder / CONFIG_NAME

    @cached_property
    def federation(self) -> Federation:
        """As it was run."""
        return load(self.path)

    @property
    def weights(self) -> Path:
        """The file of the trained model; of a run that goes on, the newest checkpoint. ConfigError if there is none yet."""
        checkpoints = sorted((self.folder / "checkpoints").glob("*.safetensors"), key=_number)
        if self.finished:
            return self.folder / MODEL_NAME
        if not checkpoints:
            raise ConfigError(
                f"the run in {self.folder} has no model yet: wait for its first round", path=str(self.folder)
            )
        return checkpoints[-1]

    @cached_property
    def model(self) -> Arrays:
        """The weights of that file, float arrays by global name (``<unit>.<tensor>``), without what the server keeps beside
        the model. :meth:`state_dict` has the names of your own module."""
        held = read_weights(self.weights)
        return {
            name: array for name, array in held.items() if "/" not in name
        }  # c/head.weight is the server's

    def state_dict(self) -> dict[str, Tensor]:
        """The same by the names of your own module: ``make().load_state_dict(run.state_dict())``, where ``make`` is the
        factory of the model. float tensors on the CPU; integer buffers and tensors that forward never uses are not in it:
        ``strict=False`` where the module has such.

        The model is built once more, for the shape of the run's data: DataError where these are gone.
        """
        names = federation_model(self.federation, open_data(self.federation)).global_names
        unnamed = {name: name for name in self.model if name not in names.values()}
        return {own: torch.tensor(self.model[name]) for own, name in (unnamed | dict(names)).items()}

    @property
    def finished(self) -> bool:
        """Whether all rounds are over."""
        return (self.folder / MODEL_NAME).is_file()

    @cached_property
    def history(self) -> tuple[RoundClosed, ...]:
        """A row for each round: accuracy and loss of the global model on the test set (None where it was not evaluated),
        its ``metrics`` by name (accuracy and f1, perplexity, mae, ...), mean training loss, seconds, bytes."""
        return rounds_of(self.folder)

    @cached_property
    def curves(self) -> Mapping[str, Array]:
        """The history as arrays, float64 (rounds,): ``round``, ``accuracy``, ``loss``, ``train_loss``, ``seconds``,
        ``up_bytes``, ``down_bytes``, ``reports``, and each of the run's metrics; NaN where there is no value. ``seconds``
        are those from a round's opening to its end, and a pause in which the run was stopped is in them."""
        rows = [msgspec.to_builtins(row) for row in self.history]
        metrics = dict.fromkeys(name for row in rows for name in row["metrics"])
        return {
            name: np.array([np.nan if row[name] is None else row[name] for row in rows], np.float64)
            for name in ("round", *_CURVES)
        } | {
            name: np.array([row["metrics"].get(name, np.nan) for row in rows], np.float64) for name in metrics
        }

    def __repr__(self) -> str:
        state = "finished" if self.finished else "unfinished"
        return f"Run({str(self.folder)!r}, {len(self.history)} rounds, {state})"


def _number(checkpoint: Path) -> int:
    """The round of a checkpoint's file."""
    return int("".join(filter(str.isdigit, checkpoint.stem)) or 0)


def load_run(folder: str | Path) -> Run:
    """What a run left in its folder. ConfigError if it is not the folder of one.

    >>> edgefl.load_run("no-such-folder")
    Traceback (most recent call last):
    edgefl.wire.errors.ConfigError: no-such-folder is not the folder of a run (no run.toml); name what `out` was
    """
    path = Path(folder)
    if not (path / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{path} is not the folder of a run (no {CONFIG_NAME}); name what `out` was", path=str(path)
        )
    return Run(path)


@dataclass(frozen=True)
class Prepared:
    """A run whose folder is ready, before its processes start. ``updates``: sizes of an update by tier."""

    lab: Lab
    dataset: Dataset
    updates: Mapping[str, UpdateSize]
    lock: FolderLock

    @property
    def federation(self) -> Federation:
        return self.lab.federation

    def train(self, watch: Callable[[News], None] = lambda _: None) -> Run:
        """Start the processes, and return when all rounds are over. KeyboardInterrupt stops it; the same call goes on."""
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
                "same call goes on",
                folder=str(run.folder),
            )
        return run


def prepare(federation: Federation | str | Path, out: str | Path, *, fresh: bool = False) -> Prepared:
    """The folder of a run of ``federation``: its configuration and each device's data, unless devices have their own. What
    cannot be trained leaves none behind.

    ConfigError if ``out`` holds another run (``fresh`` discards it) or the devices' own data, StoreError if another
    process trains in it, ModelError where model and tiers do not fit.
    """
    refuse_while_loading("start a run")
    read = federation if isinstance(federation, Federation) else load_federation(federation)
    whole = found_from_anywhere(completed(read))
    check_installed(format for tier in whole.tiers for format in whole.formats_of(tier))
    folder = Path(out).resolve()
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
            made_ready.callback(held(folder, _SERVER_LOCK, "server").release)
            if fresh:
                discard(folder)
            lab = Lab(whole, folder)
            lab.prepare(dataset, parts)
    except BaseException:
        lock.release()
        raise
    return Prepared(lab, dataset, updates, lock)


def run(
    federation: Federation | str | Path,
    out: str | Path = "runs/latest",
    *,
    fresh: bool = False,
    watch: Callable[[News], None] = lambda _: None,
) -> Run:
    """Train a federation on this machine: a broker, a server and its devices, each a process of its own.

    Args:
        federation: objects (:func:`edgefl.federation`), or their file.
        out: folder for all that the run leaves; one that was stopped goes on where it was.
        fresh: discard what an earlier run left there.
        watch: is told what happens, in the calling thread; ``print`` shows it. News of the server has a dictionary
            ``event``, such as ``{"event": "roundclosed", "round": 1, "accuracy": 0.4, ...}``.

    Raises:
        ConfigError: where the federation cannot be used, or ``out`` holds another one's run.
        EdgeflError: if a process cannot go on.
    """
    return prepare(federation, out, fresh=fresh).train(watch)


class Server:
    """A federation's server for devices elsewhere. ``run`` returns when all rounds are over, or after ``stop``.

    Made, it has compiled the tiers' bundles into ``out/bundles``. ``emit`` is told what happens. ``broker`` is
    ``host:port`` or an address; by default the one of the federation. ``ca_file``, the certificate of the broker's
    authority, switches TLS on. ``database``: SQLAlchemy URL of the journal, by default SQLite in ``out``. ``device``:
    where updates are summed and the model is evaluated, ``auto``, ``cpu`` or ``cuda``. ``sign_key``: file with the key
    that signs what the server says, made if there is none; by default one of this user's for each federation. ``enrolled``:
    the list of the devices that are let in (`edgefl enroll`); without one the first key of each name is trusted.

    StoreError if another process serves from ``out``.
    """

    def __init__(
        self,
        federation: Federation | str | Path,
        out: str | Path,
        *,
        broker: str | Address = "",
        ca_file: str = "",
        database: str = "",
        device: str = "auto",
        sign_key: str | Path | None = None,
        enrolled: str | Path | None = None,
        emit: Callable[[Event], None] = lambda _: None,
    ) -> None:
        refuse_while_loading("start a server")
        read = federation if isinstance(federation, Federation) else load_federation(federation)
        folder = Path(out)
        self._lock = held(folder, _SERVER_LOCK, "server")
        self._feed = Feed(folder)
        written = History(folder), Audit(folder), self._feed

        def told(event: Event) -> None:
            emit(event)
            for each in written:
                if (problem := each.take(event)) is not None:
                    emit(problem)

        try:
            self._service = Service(
                compose(read, open_data(read), folder, emit=told, device=device),
                _address(read, broker, ca_file),
                folder,
                emit=told,
                database=database,
                device=device,
                signer=Signer(Path(sign_key) if sign_key else folders.server_key(read.federation.name)),
                enrolled=Path(enrolled) if enrolled else None,
                crew=workers_of(read.server),
            )
            _write_down(read, folder / CONFIG_NAME)
        except AnotherConfiguration as error:
            self._release()
            raise ConfigError(f"{error.message}: {_changed(read, folder)}", **error.details) from error
        except BaseException:
            self._release()
            raise

    def run(self) -> None:
        """Serve until all rounds are over. BrokerError and its kin end it; the same folder goes on."""
        try:
            self._service.run()
        finally:
            self._release()

    def stop(self) -> None:
        """End :meth:`run` soon, from another thread or a signal handler; the run can be taken up later."""
        self._service.stop()

    def _release(self) -> None:
        """Give the folder back, with all written that was told."""
        self._feed.close()
        self._lock.release()


def _address(federation: Federation, broker: str | Address, ca_file: str) -> Address:
    """What ``broker`` says, and the federation's table where it says nothing."""
    table = federation.broker.address()
    given = table
    if isinstance(broker, Address):
        given = broker
    elif broker:
        given = Address.parse(broker)
        plain = Address(given.host, given.port)
        silent = [name for name in REACHED_BY if getattr(given, name) == getattr(plain, name)]
        given = replace(given, **{name: getattr(table, name) for name in silent})
        if not given.password and given.username in ("", table.username):
            given = replace(given, username=table.username, password=table.password)
        elif not given.password:  # what the environment holds is for whatever user there is
            given = replace(given, password=os.environ.get(PASSWORD, ""))
    return replace(given, ca_file=ca_file) if ca_file else given


def _changed(federation: Federation, folder: Path) -> str:
    """What differs from the run in ``folder``, key by key; where no key does, the code does."""
    path = folder / CONFIG_NAME
    now = found_from_anywhere(federation)
    differ = changes(load(path), now, but=UNDECIDING) if path.exists() else []
    return "; ".join(differ) or "edgefl's version, or the file of the model or of the program, is another one"


def _write_down(federation: Federation, path: Path) -> None:
    """What a server trains, for :func:`load_run`, without the broker's password; a run of one machine has its own file."""
    if not path.exists():
        write_text(path, dump(found_from_anywhere(without_password(federation))))

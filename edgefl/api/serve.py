"""Server of a federation for devices elsewhere. Imports torch only if no ``torch_process`` is given."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgefl.config import Federation, load
from edgefl.config.tables import REACHED_BY
from edgefl.config.text import changes, dump
from edgefl.errors import ConfigError
from edgefl.lab.run_folder import CONFIG_NAME, PASSWORD, without_password
from edgefl.models.user_factory import refuse_while_loading
from edgefl.setup.processor import check_device
from edgefl.setup.runs import UNDECIDING, held, imports_code, run_digest, with_absolute_paths
from edgefl.system.files import write_text
from edgefl.tracking.session import RunTracking, check_tracking
from edgefl.wire import folders
from edgefl.wire.bundle.archive import Signer
from edgefl.wire.mqtt.address import Address
from edgefl.wire.statistics import StatisticsRequest
from edgefl_server.events import Event, EventListener
from edgefl_server.round_driver import AnotherConfiguration, check_configuration
from edgefl_server.service import ServerKeys, Service
from edgefl_server.shards.pool import WorkerOptions
from edgefl_server.storage.audit import AuditLog, HistoryWriter
from edgefl_server.storage.feed import FeedWriter
from edgefl_server.storage.journal import Journal
from edgefl_server.storage.update_storage import journal_at, place_of, store_at

if TYPE_CHECKING:
    from edgefl_server.run_spec import RunSpec
    from edgefl_server.torch_process.client import TorchProcess

SERVER_LOCK = "serve.lock"
JOURNAL = "journal.sqlite"


class _EventRecorder:
    """Listener that passes each event to the user's function ``emit`` and writes it to ``files``.

    If a file cannot be written, ``emit`` gets an event about that, too.
    """

    def __init__(
        self, files: tuple[HistoryWriter | AuditLog | FeedWriter, ...], emit: Callable[[Event], None]
    ) -> None:
        self._files: tuple[HistoryWriter | AuditLog | FeedWriter | RunTracking, ...] = files
        self._emit = emit
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Pass an event to the user's function and write it to the files. Threads may call it at the same time."""
        with self._lock:
            self._emit(event)
            for file in self._files:
                if (problem := file.take(event)) is not None:
                    self._emit(problem)

    def add(self, tracking: RunTracking) -> None:
        """Pass each later event to ``tracking`` too, behind the files that it reads."""
        self._files = (*self._files, tracking)


class Server:
    """Server of a federation for devices on other machines.

    The constructor compiles the tiers' bundles into ``out/bundles`` and locks ``out``. ``run`` returns when all rounds are
    over, or after ``stop``.

    Args:
        federation: objects, or their file.
        out: folder for journal, checkpoints and bundles; a run that was stopped there is resumed.
        broker: ``host:port`` or an address; by default the one of the federation.
        ca_file: certificate of the broker's authority; switches TLS on.
        database: SQLAlchemy URL of the journal; by default SQLite in ``out``.
        device: processor that sums updates and evaluates the model, ``auto``, ``cpu`` or ``cuda``.
        sign_key: file with the key that signs all messages, made if there is none; by default the user's own.
        enrolled: list of the devices that may join (`edgefl enroll`); None trusts the first key of each name.
        torch_process: process with torch, so that this one needs none; its owner closes it.
        emit: called with each event.
        evaluate: add one evaluation round to a finished run; or, with a request for statistics, ask devices once for
            those of their data and train nothing, which needs torch in this process.

    Raises:
        StoreError: another process serves from ``out``.
        ConfigError: the federation cannot be used, or ``out`` holds a run of another federation.
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
        torch_process: TorchProcess | None = None,
        evaluate: bool | StatisticsRequest = False,
    ) -> None:
        refuse_while_loading("start a server")
        check_device(device)
        read = federation if isinstance(federation, Federation) else load(Path(federation))
        folder = Path(out)
        self._lock = held(folder, SERVER_LOCK, "server")
        self._feed = FeedWriter(folder)
        self._recorder = _EventRecorder((HistoryWriter(folder), AuditLog(folder), self._feed), emit)
        self._tracking: RunTracking | None = None
        try:
            _check_run(read, folder, database, evaluate)
            spec, device = _compose(read, folder, device, self._recorder, torch_process, evaluate)
            signer = Signer(Path(sign_key) if sign_key else folders.server_key(read.federation.name))
            self._service = Service(
                spec,
                reached_at(read, broker, ca_file),
                folder,
                self._recorder,
                database=database,
                device=device,
                keys=ServerKeys(signer, Path(enrolled) if enrolled else None),
                workers=WorkerOptions.of(read.server),
                evaluate=bool(evaluate),
            )
            self._complete_folder(read, folder, is_tracked=not isinstance(evaluate, StatisticsRequest))
        except AnotherConfiguration as error:
            self._release()
            raise ConfigError(f"{error.message}: {_changes(read, folder)}", **error.details) from error
        except BaseException:
            self._release()
            raise

    def run(self) -> None:
        """Serve until all rounds are over or :meth:`stop` is called. A later server in the same folder resumes.

        Releases the lock of the folder at the end, so call it once.

        Raises:
            EdgeflError: the server cannot continue, for example without a broker.
        """
        try:
            self._service.run()
        finally:
            self._release()

    def stop(self) -> None:
        """Make :meth:`run` return soon, from another thread or a signal handler. A later server resumes the run."""
        self._service.stop()
        if self._tracking is not None:
            self._tracking.hurry()

    def _complete_folder(self, federation: Federation, folder: Path, *, is_tracked: bool) -> None:
        """Write the configuration into the folder, and open the trackers, which get the events from now on.

        Raises:
            ConfigError: a tracker cannot be used.
        """
        if not (config := folder / CONFIG_NAME).exists():  # a run of one machine has its own file
            write_text(config, dump(with_absolute_paths(without_password(federation))))
        if not is_tracked:
            return
        try:
            self._tracking = RunTracking(federation, folder)
        except BaseException:
            self._service.close()
            raise
        self._recorder.add(self._tracking)

    def _release(self) -> None:
        """Write all remaining events and end the trackers, then release the folder's lock."""
        try:
            if self._tracking is not None:
                self._tracking.close()
                for warning in self._tracking.warnings():
                    self._recorder.emit(warning)
        finally:
            self._feed.close()
            self._lock.release()


def _compose(
    federation: Federation,
    folder: Path,
    device: str,
    listener: EventListener,
    torch_process: TorchProcess | None,
    evaluate: bool | StatisticsRequest,
) -> tuple[RunSpec, str]:
    """Return (run spec, processor that sums updates): all data and functions that the server needs for the run.

    They are composed in ``torch_process``, or in this process if that is None or ``evaluate`` asks for statistics. The spec
    sends warnings to ``listener``.
    """
    request = evaluate if isinstance(evaluate, StatisticsRequest) else None
    if torch_process is not None and request is None:
        return torch_process.composed(federation, folder, device=device, listener=listener)
    from edgefl.setup.data import open_data
    from edgefl_server.compose import compose, compose_statistics

    dataset = open_data(federation)
    if request is not None:
        return compose_statistics(federation, dataset, request, folder, listener=listener), device
    return compose(federation, dataset, folder, listener=listener, device=device), device


def _check_run(
    federation: Federation, folder: Path, database: str, evaluate: bool | StatisticsRequest
) -> None:
    """Check the run before its tiers are compiled. A round of statistics is neither tracked nor checked.

    If the federation names code of the user, the service checks the settings of an earlier run after compiling.

    Raises:
        ConfigError: a tracker cannot be used.
        AnotherConfiguration: the journal contains a run with other settings.
    """
    if isinstance(evaluate, StatisticsRequest):
        return
    check_tracking(federation, folder)
    path = folder.resolve() / JOURNAL
    if imports_code(federation) or not (database or path.exists()):
        return
    name, updates = federation.federation.name, place_of("", federation.federation.name, folder)
    with closing(Journal(database or journal_at(path), name, store_at(updates))) as journal:
        run = journal.latest_run()
    if run is not None:
        check_configuration(run, name, run_digest(federation))


def reached_at(federation: Federation, broker: str | Address = "", ca_file: str = "") -> Address:
    """Return the address of the server's broker, with its login.

    Args:
        federation: the federation, whose table ``[broker]`` has the defaults.
        broker: an address, which is used as it is; text such as ``host:port``, whose missing parts come from the
            table; "" for the address of the table.
        ca_file: certificate of the broker's authority; switches TLS on.

    Raises:
        BrokerError: the text is no address, or a password file cannot be read.
    """
    table = federation.broker.address()
    given = table
    if isinstance(broker, Address):
        given = broker
    elif broker:
        given = Address.parse(broker)
        plain = Address(given.host, given.port)
        silent = [name for name in REACHED_BY if getattr(given, name) == getattr(plain, name)]
        given = replace(given, **{name: getattr(table, name) for name in silent})
        user = given.username or table.username
        if not given.password and table.username in ("", user):
            given = replace(given, username=user, password=table.password)
        if not given.password and user:  # what the environment holds is for whatever user there is
            given = replace(given, password=os.environ.get(PASSWORD, ""))
    return replace(given, ca_file=ca_file) if ca_file else given


def _changes(federation: Federation, folder: Path) -> str:
    """Return a text with the keys that differ from those of the run in ``folder``.

    If none differ, the text says that edgefl's version or the user's code has changed.
    """
    path = folder / CONFIG_NAME
    now = with_absolute_paths(federation)
    differ = changes(load(path), now, but=UNDECIDING) if path.exists() else []
    return (
        "; ".join(differ) or "edgefl's version, or the file of the model or of the algorithm, is another one"
    )

"""Fixtures that every room shares: real brokers on free ports, and broker sessions that are stopped at the end."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import typing
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import settings

from edgefl.lab.broker import free_port
from edgefl.system.processes import end_process
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.session import Session
from edgefl_server.broker import mosquitto_base
from tests import needs
from tests.rings import importing, record, samples

START_S = 120.0

# A busy machine is no fault: tests assert no times. And what fails once fails again: the same examples each time, more of
# them where all tests run (``--hypothesis-profile all``).
settings.register_profile("edgefl", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("all", settings.get_profile("edgefl"), max_examples=100)
settings.load_profile("edgefl")

# A server that is given no key takes this user's: not in tests.
if "EDGEFL_KEYS" not in os.environ:
    os.environ["EDGEFL_KEYS"] = tempfile.mkdtemp(prefix="edgefl-keys-")
    atexit.register(shutil.rmtree, os.environ["EDGEFL_KEYS"], ignore_errors=True)

# Data beside the repository, where a machine has some; the algorithms that tests start inherit the variable.
_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
if _DATA.is_dir():
    os.environ.setdefault("EDGEFL_DATA", str(_DATA))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """What is imported and collected stays: searches for garbage would find none."""
    gc.disable()
    try:
        importing.import_by_turns(session.config)
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what collecting made out of later searches for garbage: rounds make one before they measure memory.

    Searches are rare afterwards, because they take 2 % of the time at Python's own threshold of 700 objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


def pytest_runtest_teardown() -> None:
    """Forget what a command that ran in this process sets for its children: children of other tests import ``tests``."""
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(scope="session", autouse=True)
def garbage_is_not_searched_between_stages() -> Iterator[None]:
    """A device searches for garbage between the stages of a round and behind it. In the tests' own process that of all tests
    is searched, a third of a second each time; devices in processes of their own search as ever."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("agent", "personal.personalize", "round.trainer", "round.forward", "round.autotune"):
            patch.setattr(f"edgefl_device.{place}.trim_memory", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """typer builds all commands anew for each call of one in this process."""
    testing = sys.modules.get("typer.testing")
    with pytest.MonkeyPatch.context() as patch:
        if testing is not None:
            patch.setattr(testing, "_get_command", functools.cache(testing.__dict__["_get_command"]))
        yield


@pytest.fixture(scope="session", autouse=True)
def protocols_are_read_once() -> Iterator[None]:
    """Keep the list of a protocol's attributes, as later versions of Python do.

    Python 3.11 makes it anew for each isinstance: 2 % of the time of tests that train in torch, since losses are protocols.
    """
    with pytest.MonkeyPatch.context() as patch:
        listed = getattr(typing, "_get_protocol_attrs", None)
        if listed is not None:
            patch.setattr(typing, "_get_protocol_attrs", functools.cache(listed))
        yield


@pytest.fixture(scope="session", autouse=True)
def op_functions_are_read_once() -> Iterator[None]:
    """torch.onnx reads its 500 op functions again for each graph of ops that it has to decompose first: a second of work.

    Only where tests export: they have imported the table by now.
    """
    tables = sys.modules.get("edgefl_export.onnx.model")
    with pytest.MonkeyPatch.context() as patch:
        if tables is not None and tables._from_torchlib is not None:
            patch.setattr(tables._REGISTRY, "from_torchlib", staticmethod(tables._registry))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        for algorithm in mark.args:
            needs.require(algorithm)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line for each reason to skip tests."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", type=Path, metavar="FILE", help="write what each file took if all tests pass"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):  # as in `make test &`; processes that tests start inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(
        config, "workerinput"
    ):  # processes of xdist have the variable from the one that starts them
        folder = tempfile.TemporaryDirectory(prefix="edgefl-bundles-")
        os.environ["EDGEFL_CACHE"] = folder.name  # never the user's own
        config.add_cleanup(folder.cleanup)
    needs.skip_in_this_process()
    path: Path | None = config.getoption("--record")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(record.Recorder(path))


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the other ring is left out, and after it
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    samples.mark(items)
    yield
    record.longest_first(items, record.load())


class BrokerProcess(ABC):
    """A broker in its own process. What it keeps is in memory: a restart forgets sessions and retained messages."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._log = folder / f"broker-{self.port}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    @abstractmethod
    def _command(self) -> list[str]:
        """The algorithm and its arguments."""

    def _options(self) -> dict[str, Any]:
        """Further options of the process."""
        return {}

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, **self._options())
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self._log.read_text()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise AssertionError(f"no broker listens on {self.port}: {self._log.read_text()}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kill(self) -> None:
        """End it at once, as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        if self._process is not None:
            # Mosquitto forgets a SIGTERM that comes between its first listener and its main loop: then it is killed.
            end_process(self._process)
            self._process = None


class Mosquitto(BrokerProcess):
    """The real thing, as people run it; ``extra`` is the last line of its configuration."""

    def __init__(self, folder: Path, extra: str = "", *, allow_anonymous: bool = True) -> None:
        super().__init__(folder)
        self._extra = extra
        self._allow_anonymous = allow_anonymous

    def _command(self) -> list[str]:
        algorithm = needs.require("mosquitto")
        lines = [
            f"listener {self.port} 127.0.0.1",
            f"allow_anonymous {str(self._allow_anonymous).lower()}",
            *mosquitto_base(),
            self._extra,
        ]
        config = self._folder / f"mosquitto-{self.port}.conf"
        config.write_text("\n".join(lines) + "\n")
        return [algorithm, "-c", str(config)]


class Amqtt(BrokerProcess):
    """The broker inside ``edgefl run``."""

    def _command(self) -> list[str]:
        script = f"from edgefl_server.embedded_broker import run_amqtt; run_amqtt('127.0.0.1', {self.port})"
        return [sys.executable, "-c", script]


def _broker_kind() -> type[BrokerProcess]:
    if os.environ.get("EDGEFL_TEST_BROKER") == "aedes":
        from tests.other_brokers.brokers import Aedes

        return Aedes
    is_wanted = needs.find("mosquitto") or os.environ.get("EDGEFL_REQUIRE_PROGRAMS")
    return Mosquitto if is_wanted else Amqtt


@pytest.fixture(scope="session")
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests that leave it alone; give each test its own ``federation``.

    The embedded broker stands in where Mosquitto is not installed, so that a bare machine tests as much as it can.
    """
    with _broker_kind()(tmp_path_factory.mktemp("mosquitto")) as broker:
        yield broker


@pytest.fixture(scope="session")
def amqtt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Amqtt]:
    """The embedded broker, shared like :func:`mosquitto`."""
    with Amqtt(tmp_path_factory.mktemp("amqtt")) as broker:
        yield broker


@pytest.fixture(scope="session")
def aedes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """aedes, a broker that edgefl does not start itself, shared like :func:`mosquitto`."""
    from tests.other_brokers.brokers import Aedes

    with Aedes(tmp_path_factory.mktemp("aedes")) as broker:
        yield broker


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> BrokerProcess:
    """Mosquitto; with :data:`on_each_broker` the test runs once on each."""
    found: BrokerProcess = request.getfixturevalue(getattr(request, "param", "mosquitto"))
    return found


_OTHER = pytest.param("aedes", marks=pytest.mark.slow)
on_each_broker = pytest.mark.parametrize("broker", ["mosquitto", "amqtt", _OTHER], indirect=True)
on_other_broker = pytest.mark.parametrize("broker", ["mosquitto", _OTHER], indirect=True)
"""Marks of tests whose broker edgefl starts itself, and of those whose broker runs already."""


@pytest.fixture
def own_mosquitto(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that the test may kill and start again on the same port."""
    with _broker_kind()(tmp_path) as broker:
        yield broker


@pytest.fixture
def folder_in_memory() -> Iterator[Path]:
    """A folder in memory, if that is large: servers and agents spend a quarter of their time on waiting for the disk."""
    memory = Path("/dev/shm")
    found = os.statvfs(memory) if memory.is_dir() else None
    fits = found and found.f_bavail * found.f_frsize > 1 << 30 and not found.f_flag & os.ST_NOEXEC
    place = memory if fits else None
    with tempfile.TemporaryDirectory(prefix="edgefl-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def federation() -> str:
    """A name no other test uses, so that tests can share a broker."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def limits() -> Limits:
    """Small sizes and short times: tests exercise windows and retries, not patience."""
    return Limits(
        chunk_bytes=1024,
        fetch_window=4,
        fetch_timeout_s=0.5,
        fetch_retries=3,
        ack_timeout_s=0.5,
        reconnect_min_s=0.02,
        reconnect_max_s=0.1,
        retry_pause_s=0.05,
        checkpoint_steps=1,
    )


SessionFactory = Callable[..., Session]


@pytest.fixture
def connect(limits: Limits) -> Iterator[SessionFactory]:
    """``connect(address, client_id, **kwargs)``: a started session that is stopped when the test ends."""
    sessions: list[Session] = []

    def make(address: Address, client_id: str = "", *, start: bool = True, **kwargs: object) -> Session:
        session = Session(
            address,
            client_id or f"test-{uuid.uuid4().hex[:12]}",
            **{"limits": limits, **kwargs},  # type: ignore[arg-type]
        )
        sessions.append(session)
        if start:
            session.start()
        return session

    yield make
    for session in sessions:
        session.stop(drain_s=0.2)

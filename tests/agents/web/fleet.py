"""One device in Chromium and one of Python train one model: a real server and broker, and a proxy that can hold and cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgefl.config import load
from edgefl.errors import ConfigError
from edgefl.lab.agents import command_of
from edgefl.lab.lab import Lab
from edgefl.setup.data import open_data, partition
from edgefl.setup.tiers import completed
from edgefl.wire.mqtt.address import Address
from edgefl_device.agent import DeviceAgent
from edgefl_device.config import AgentConfig, DeviceLog
from edgefl_device.engine import open_engine
from edgefl_server.compose import compose
from edgefl_server.events import RoundClosed
from tests import needs
from tests.e2e.tap import Direction, Tap
from tests.server.fleet import RunningServer

PATIENCE_S = 180.0
ROUNDS = 2

# Updates of one bit with a residual on the device, in many chunks; patches on the way down; a record where units are frozen.
CONFIG = f"""
[federation]
name = "browsers"
rounds = {ROUNDS}
seed = 7
[model]
name = "mlp"
options = {{ hidden = [1024] }}
[algorithm]
batch = 8
steps = 40
lr = 0.05
[codec]
name = "ef_signsgd"
[downlink]
encoding = "int8"
[data]
name = "digits"
train_samples = 240
test_samples = 100
[limits]
checkpoint_steps = 2
chunk_bytes = 1024
upload_window = 2
ack_timeout_s = 5
[tiers.strong]
count = 1
[tiers.weak]
cut = 1
chunks = 1
count = 1
"""


def require_browser() -> None:
    """Skip the test if a browser's device cannot be started."""
    needs.require("node")
    needs.require("chromium")
    try:
        command_of("web")
    except ConfigError as error:
        needs.skip(error.message)


class Relay(Tap):
    """Passes on what is said, and holds an update in the middle where it is asked to."""

    def __init__(self, broker: Address) -> None:
        self._let = threading.Event()
        self._let.set()
        self._chunks = 0
        super().__init__(broker)

    def hold_after(self, chunks: int) -> None:
        """Once so many more chunks of updates came in, nothing goes on in their direction until ``release``."""
        self._chunks = len(self.packets("in", "/updates/")) + chunks
        self._let.clear()

    def is_holding(self) -> bool:
        return not self._let.is_set() and len(self.packets("in", "/updates/")) >= self._chunks

    def release(self) -> None:
        self._let.set()

    def cut(self) -> None:
        """End all connections, as a link that breaks does."""
        ended, self._sockets = self._sockets, []
        for each in ended:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _read(self, data: bytes, direction: Direction) -> bytes:
        rest = super()._read(data, direction)
        if direction == "in" and self.is_holding():
            self._let.wait(PATIENCE_S)
        return rest


@dataclass
class Browser:
    """A device in Chromium, as the launcher runs it."""

    arguments: list[str]
    relay: Relay
    store: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    reader: threading.Thread | None = None

    def start(self) -> None:
        self.process = subprocess.Popen([*command_of("web"), *self.arguments], stdout=subprocess.PIPE)
        self.reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self.reader.start()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.events.append(json.loads(line))

    def said(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def wait_until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"no {what}: {self.events}"
            time.sleep(0.01)

    def under_way(self) -> None:
        """Until it is in the middle of its first round's steps."""
        self.wait_until(lambda: self.said("round"), "round")
        time.sleep(0.3)

    def kill_tab(self) -> None:
        """SIGKILL the process of its page."""
        for pid in self._processes("--type=renderer"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL its launcher; the browser is left as it is."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def reload(self) -> None:
        """As a person does by a key."""
        assert self.process is not None
        self.process.send_signal(signal.SIGUSR2)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
        for pid in self._processes(""):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self, part: str) -> list[int]:
        mark, found = str(self.store).encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                line = (folder / "cmdline").read_bytes()
                if mark in line and part.encode() in line and b"chrom" in line:
                    found.append(int(folder.name))
        return found


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    rounds: list[RoundClosed]
    events: list[dict[str, Any]]
    code: int

    @property
    def weights(self) -> str:
        return self.rounds[-1].weights_sha256


def train(
    folder: Path,
    broker: Address,
    federation: str,
    disturb: Callable[[Browser], None] = lambda _: None,
    *,
    browsers: str = "strong",
) -> Trained:
    """The run of CONFIG, in which the device of the tier ``browsers`` is a browser, disturbed once it runs."""
    folder.mkdir(parents=True)
    file = folder / "federation.toml"
    file.write_text(CONFIG)
    settings = completed(load(file, {"federation.name": federation}))
    dataset, lab = open_data(settings), Lab(settings, folder)
    lab.prepare(dataset, partition(settings, dataset, len(lab.devices)))
    plan = compose(settings, dataset, folder, device="cpu")
    with ExitStack() as stack:
        server = RunningServer.start(plan, broker, folder, device="cpu")
        stack.callback(server.service.stop)
        relay = Relay(broker)
        stack.callback(relay.close)
        for name in lab.devices:
            data, store = folder / "devices" / name / "data.npz", folder / "devices" / name / "store"
            if name.startswith(browsers):
                limits = settings.wire_limits
                told = ("checkpoint_steps", "chunk_bytes", "upload_window", "ack_timeout_s")
                where = ["--broker", f"{relay.address.host}:{relay.address.port}", "--federation", federation]
                arguments = [
                    "--id",
                    name,
                    "--data",
                    str(data),
                    "--store",
                    str(store),
                    "--until-done",
                    "--json",
                ]
                arguments += [f"--limit={key}={getattr(limits, key)}" for key in told]
                browser = Browser([*where, *arguments], relay, store)
                stack.callback(browser.end)
                browser.start()
            else:
                config = AgentConfig(
                    federation=federation,
                    device=name,
                    broker=broker,
                    data=data,
                    folder=store,
                    until_done=True,
                    limits=settings.wire_limits,
                )
                agent = DeviceAgent(config, open_engine("onnx"), DeviceLog(lambda _: None))
                threading.Thread(target=agent.run, daemon=True).start()
                stack.callback(agent.stop)
        disturb(browser)
        server.join()
        assert browser.process is not None and browser.reader is not None
        code = browser.process.wait(PATIENCE_S)
        browser.reader.join(PATIENCE_S)
    return Trained(server.seen_of(RoundClosed), browser.events, code)

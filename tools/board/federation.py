"""A federation whose server and broker run here, and whose devices run on the board."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgefl.data.dataset import write_client
from edgefl.data.datasets import digits
from edgefl.lab.broker import free_port
from edgefl_server.lab_broker import LabBroker
from tools.board.root import BoardError, BoardRoot, run

FEDERATION, ROUNDS, SAMPLES = "board", 3, 60
EDGEFL = (sys.executable, "-m", "edgefl")
WAIT_S, LOOK_S = 1500.0, 0.5
CHECKPOINT_STEPS = 2
AGENT_OPTIONS = {"limit": f"checkpoint_steps={CHECKPOINT_STEPS}"}
_MOST_LINES = 12
CONFIG = f"""
[federation]
name = "{FEDERATION}"
rounds = {ROUNDS}
seed = 7
[model]
name = "mlp"
options = {{ hidden = [32] }}
[algorithm]
name = "fedavg_update"
batch = 8
steps = 60
lr = 0.05
[data]
name = "digits"
train_samples = 360
test_samples = 100
[round]
min_devices = DEVICES
min_reports = DEVICES
[limits]
round_deadline_s = 1200
offline_grace_s = 600
[export]
formats = ["onnx", "executorch"]
[tiers.strong]
[tiers.weak]
devices = ["*-executorch"]
cut = 1
chunks = 1
"""


@dataclass
class BoardDevice:
    """A device on the board, killed once at its second checkpoint of a round and started again.

    Attributes:
        name: Its name, ``KIND-ENGINE``.
        agent: Command of the agent in the root.
        engine, tier: Its engine, and the tier that it asks for.
        options: Further options.
        events: Events of all its processes.
        resumed: Step of the checkpoint that the killed process left; -1 before.
        continued: Step of the first checkpoint that the next process stored; -1 before.
    """

    name: str
    agent: Sequence[str]
    engine: str
    tier: str
    options: Sequence[str] = ()
    events: list[dict[str, Any]] = field(default_factory=list)
    resumed: int = -1
    continued: int = -1
    code: int | None = None
    last_lines: str = ""

    def serve(self, command: Sequence[str], store: Path, log: Path) -> None:
        """Run the agent until it ends by itself. Kill it once."""
        while True:
            with (
                log.open("a") as errors,
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
            ):
                watched = self._kill if self.resumed < 0 else self._note_next
                watch = threading.Thread(target=watched, args=(process, store), daemon=True)
                watch.start()
                assert process.stdout is not None
                for line in process.stdout:
                    with suppress(ValueError):
                        self.events.append(json.loads(line))
                process.wait()
            watch.join()
            if process.returncode != -signal.SIGKILL:
                self.code = process.returncode
                self.last_lines = "\n".join(log.read_text().splitlines()[-_MOST_LINES:])
                return

    def _kill(self, process: subprocess.Popen[str], store: Path) -> None:
        """Kill the process once it has stored a second checkpoint, and note the step of what it left.

        A round that is begun anew stores the first one again.
        """
        while process.poll() is None:
            if _checkpoint(store) > CHECKPOINT_STEPS:
                process.kill()
                process.wait()
                self.resumed = _checkpoint(store)
                return
            time.sleep(0.005)

    def _note_next(self, process: subprocess.Popen[str], store: Path) -> None:
        """Note the step of the first checkpoint that the process stores."""
        while process.poll() is None:
            if (step := _checkpoint(store)) not in (-1, self.resumed):
                self.continued = step
                return
            time.sleep(0.005)

    def problems(self) -> list[str]:
        """Return what went wrong with the device."""
        names = [str(event["event"]) for event in self.events]
        found = [] if self.code == 0 else [f"exit code {self.code}: {self.last_lines}"]
        if self.resumed < 0:
            found.append("it was not killed at a checkpoint")
        elif self.continued <= self.resumed:
            found.append(f"killed at step {self.resumed}, it began the round anew: next was {self.continued}")
        found += (
            []
            if names.count("accepted") >= ROUNDS
            else [f"{names.count('accepted')} accepted updates of {ROUNDS}"]
        )
        wrong = sorted({"failed", "declined", "refused", "rejected"} & set(names))
        texts = [str(event["text"]) for event in self.events if event["event"] in wrong]
        return [f"{self.name}: {each}" for each in (*found, *texts[:3])]


def board_devices(agents: Mapping[str, Sequence[str]]) -> list[BoardDevice]:
    """Return a device of each agent on each engine. The engine of the first one has a process of its own."""
    devices = [
        BoardDevice(f"{kind}-{engine}", command, engine, tier)
        for kind, command in agents.items()
        for engine, tier in (("onnx", "strong"), ("executorch", "weak"))
    ]
    if "python" in agents:
        devices[0].options = ("--sandbox", "always")
    return devices


def train(root: BoardRoot, folder: Path, devices: Sequence[BoardDevice]) -> dict[str, Any]:
    """Train the federation over Mosquitto with TLS, users and an access list. Every device enrols with a token.

    Args:
        root: The board.
        folder: New folder below the one that the board shares.
        devices: Devices to start.

    Returns:
        Rounds as the server closed them, the agents' names and what their processes are not confined by, and the
        metrics of a personalized model.

    Raises:
        BoardError: A round is not accepted, a device was not killed, or a process failed; with all reasons.
    """
    folder.mkdir(parents=True)
    names = tuple(device.name for device in devices)
    lab = LabBroker(folder=folder / "broker", federation=FEDERATION, devices=names, port=free_port())
    (folder / "federation.toml").write_text(CONFIG.replace("DEVICES", str(len(devices))))
    server_key = json.loads(run([*EDGEFL, "key", "new", folder / "server.key", "--json"]))["public_key"]
    signing: dict[str, object] = {"sign-key": folder / "server.key"}
    with ExitStack() as stack:
        _start(stack, lab.command(), folder / "broker.log")
        _wait_for_port(lab.port)
        files: dict[str, object] = {
            "config": folder / "federation.toml",
            "out": folder / "run",
            "enrolled": folder / "devices.sqlite",
        }
        server = [*EDGEFL, "server", *_options(files | signing | lab.needs("server")), "--json"]
        served = _start(stack, server, folder / "server.jsonl")
        threads = []
        data = digits()
        for place, device in enumerate(devices):
            rows = slice(place * SAMPLES, (place + 1) * SAMPLES)
            write_client(
                folder / f"{device.name}.npz", data.train_x[rows], data.train_y[rows].astype(np.int64)
            )
            token, store = folder / f"{device.name}.token", folder / device.name
            listed: dict[str, object] = {
                "federation": FEDERATION,
                "list": folder / "devices.sqlite",
            } | signing
            enrolled = run([*EDGEFL, "enroll", "token", device.name, *_options(listed)])
            token.write_text(enrolled.strip().splitlines()[-1] + "\n")
            options = _device_options(lab, device, folder) | {
                "store": store,
                "token": f"@{token}",
                **AGENT_OPTIONS,
            }
            command = [*device.agent, *_options(options), "--until-done", "--json", *device.options]
            arguments = (root.command(*command), store, folder / f"{device.name}.log")
            threads.append(threading.Thread(target=device.serve, args=arguments, daemon=True))
            threads[-1].start()
        deadline = time.monotonic() + WAIT_S
        while (
            served.poll() is None
            and time.monotonic() < deadline
            and not any(device.code for device in devices)
        ):
            time.sleep(LOOK_S)
        for thread in threads:
            thread.join(WAIT_S / 5 if served.poll() == 0 else LOOK_S)
        events = [
            json.loads(line)
            for line in (folder / "server.jsonl").read_text().splitlines()
            if line.startswith("{")
        ]
        rounds = [event for event in events if event["event"] == "roundclosed"]
        problems = [f"server: exit code {served.poll()}: {_tail(folder / 'server.jsonl')}"] * (
            served.poll() != 0
        )
        outcomes = [(each["outcome"], each["reports"]) for each in rounds]
        if outcomes != [("closed", len(devices))] * ROUNDS:
            problems.append(
                f"expected {ROUNDS} closed rounds with {len(devices)} updates each, found {outcomes}"
            )
        problems += [problem for device in devices for problem in device.problems()]
        not_confined = {
            event["text"] for device in devices for event in device.events if event["event"] == "sandbox"
        }
        if any("--sandbox" in device.options for device in devices) and len(not_confined) < 2:
            problems.append(
                f"expected that the agent reports seccomp and Landlock as missing, found {sorted(not_confined)}"
            )
        if problems:
            raise BoardError("\n".join(problems))
        personal = _personalize(root, lab, folder, devices[0], server_key)
    return {
        "rounds": [
            {key: each[key] for key in ("round", "outcome", "reports", "weights_sha256")} for each in rounds
        ],
        "resumed_at_step": {device.name: device.resumed for device in devices},
        "next_checkpoint": {device.name: device.continued for device in devices},
        "not_confined": sorted(not_confined),
        "personalized": personal,
    }


def _checkpoint(store: Path) -> int:
    """Return the step of the checkpoint in the folder of a store; -1 without one."""
    place = f"file:{store / 'store.sqlite3'}?mode=ro"
    with suppress(sqlite3.Error), closing(sqlite3.connect(place, uri=True, timeout=0.1)) as database:
        return max((int(step) for (step,) in database.execute("SELECT step FROM checkpoint")), default=-1)
    return -1


def _device_options(lab: LabBroker, device: BoardDevice, folder: Path) -> dict[str, object]:
    """Return the options that an agent and `edgefl device personalize` share, by name."""
    named: dict[str, object] = {
        "id": device.name,
        "federation": FEDERATION,
        "data": folder / f"{device.name}.npz",
    }
    return named | {"engine": device.engine, "tier": device.tier} | lab.needs(device.name)


def _options(values: Mapping[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def _personalize(
    root: BoardRoot, lab: LabBroker, folder: Path, device: BoardDevice, server_key: str
) -> dict[str, Any]:
    """Adapt the trained model to the data of ``device`` on the board."""
    options = _device_options(lab, device, folder) | {"store": folder / "personal", "server-key": server_key}
    metrics: dict[str, Any] = json.loads(
        root.run("edgefl", "device", "personalize", *_options(options), "--json")
    )
    return metrics


def _start(stack: ExitStack, command: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=output, stderr=errors, env={**os.environ}
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def _wait_for_port(port: int) -> None:
    for _ in range(600):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise BoardError(f"expected a broker on port {port}, found none")


def _tail(log: Path) -> str:
    texts = [path.read_text(errors="replace") for path in (log, log.with_suffix(".err")) if path.exists()]
    return "\n".join("\n".join(texts).splitlines()[-_MOST_LINES:])

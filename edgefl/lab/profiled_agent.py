"""A profile through any agent: its command is started beside a broker of its own, asked over it, and ended.

::

    report = profiled(["edgefl-agent"], bundle, Through(device="pixel-7", folder=folder))
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgefl.lab.agent_process import AgentProcess
from edgefl.lab.broker import lab_broker
from edgefl.lab.written import PASSWORD
from edgefl.system.processes import last_line
from edgefl.wire.bundle.archive import Bundle, Signer
from edgefl.wire.mqtt.address import Address
from edgefl_server.profiling.fleet import FleetProfiler, Wanted
from edgefl_server.profiling.rows import DeviceReport, FleetReport, by_tier

_HOST = "127.0.0.1"
_BROKER_S = 20.0
_END_S = 5.0
_SETTLE_S = 0.5
"""After the end of the agent: its last words may still be on the way."""


@dataclass(frozen=True, kw_only=True)
class Through:
    """``device``: what the agent is called. ``data``: local samples that an agent needs to start, which no profile reads.
    ``folder``: for its store and its log. ``broker``: an address in place of a broker of its own."""

    device: str
    data: Path
    folder: Path
    broker: Address | None = None
    repeat: int = 20
    timeout_s: float = 300.0


def profiled(
    command: Sequence[str],
    bundle: Bundle,
    how: Through,
    *,
    tell: Callable[[FleetReport], None] = lambda _: None,
    stopping: Callable[[FleetProfiler], None] = lambda _: None,
) -> DeviceReport:
    """What the agent of ``command`` answers; where it does not, its report says why.

    The options of `edgefl device` are appended: --id, --broker, --federation, --data, --store, --engine and --server-key,
    of a key that is made for this. ``stopping`` gets the profiler, whose ``stop`` ends this early. ConfigError if there is
    no such command, BrokerError without a broker.
    """
    federation = f"profile-{secrets.token_hex(4)}"
    wanted = Wanted(
        federation=federation,
        offered=by_tier([bundle]),
        devices=frozenset({how.device}),
        repeat=how.repeat,
        timeout_s=how.timeout_s,
    )
    with _broker(how) as address:
        signer = Signer(how.folder / "key")
        options = ["--id", how.device, "--broker", str(address), "--federation", federation]
        options += ["--data", str(how.data), "--store", str(how.folder / "store")]
        options += ["--engine", bundle.manifest.format, "--server-key", signer.public_key]
        options += [word for name, path in _files(address).items() if path for word in (name, path)]
        log = how.folder / "agent.log"
        environment = {PASSWORD: address.password} if address.password else {}
        agent = AgentProcess([*command, *options], log, environment)
        try:
            profiler = FleetProfiler(address, wanted, signer=signer, tell=tell)
            stopping(profiler)
            threading.Thread(target=_watch, args=(agent, profiler), daemon=True).start()
            report = profiler.run().devices[0]
            return report if report.profile else _explained(report, agent, log)
        finally:
            agent.terminate()
            agent.wait(_END_S)
            agent.kill()


def _files(address: Address) -> dict[str, str]:
    return {"--ca-file": address.ca_file, "--cert-file": address.cert_file, "--key-file": address.key_file}


def _watch(agent: AgentProcess, profiler: FleetProfiler) -> None:
    """Stop the profiler once the agent has ended, because nobody answers any more."""
    agent.wait()
    time.sleep(_SETTLE_S)
    profiler.stop()


def _explained(report: DeviceReport, agent: AgentProcess, log: Path) -> DeviceReport:
    """``report`` with what became of the agent, where that is why it did not answer."""
    code, last = agent.exit_code, _last_line(log)
    said = f", and its last words were: {last}" if last else ", and it wrote nothing"
    if code is not None:
        text = f"the command ended with exit code {code} before it answered{said}"
        return msgspec.structs.replace(report, state="offline", reason="ended", text=text)
    if report.state in ("unknown", "silent"):
        text = f"the command runs, and no agent {report.device!r} came to the broker or answered it{said}"
        return msgspec.structs.replace(report, state="silent", text=text)
    return report


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        last = last_line(file.read().decode(errors="replace"), "")
    return "".join(letter for letter in last if letter.isprintable())[:300]


@contextlib.contextmanager
def _broker(how: Through) -> Iterator[Address]:
    """The broker that was named, or one of its own on this machine: Mosquitto where it is installed."""
    if how.broker is not None:
        yield how.broker
        return
    with lab_broker(how.folder, _BROKER_S) as port:
        yield Address(_HOST, port)

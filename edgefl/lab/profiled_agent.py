"""Profile of a bundle by any agent, with a temporary broker.

::

    report = profile_by_agent(["edgefl-agent"], bundle, AgentProfileOptions(device="pixel-7", folder=folder))
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

from edgefl.lab.broker import lab_broker
from edgefl.lab.processes import AgentProcess
from edgefl.lab.run_folder import PASSWORD
from edgefl.system.processes import last_line
from edgefl.wire.bundle.archive import BundleArchive, Signer
from edgefl.wire.mqtt.address import Address
from edgefl_server.profiling.fleet import FleetProfiler, ProfilingOptions
from edgefl_server.profiling.reports import DeviceReport, FleetReport, by_tier

_HOST = "127.0.0.1"
_BROKER_S = 20.0
_END_S = 5.0
_SETTLE_S = 0.5
"""Wait after the end of the agent, for messages in flight."""


@dataclass(frozen=True, kw_only=True)
class AgentProfileOptions:
    """Options of a profile by an agent.

    Attributes:
        device: name of the agent.
        data: file of local samples. An agent needs one to start, but a profile does not read it.
        folder: folder for the agent's store and log.
        broker: address of a broker; None to start one.
        repeat: number of measured calls.
        timeout_s: limit of the profile in seconds.
    """

    device: str
    data: Path
    folder: Path
    broker: Address | None = None
    repeat: int = 20
    timeout_s: float = 300.0


def profile_by_agent(
    command: Sequence[str],
    bundle: BundleArchive,
    how: AgentProfileOptions,
    *,
    on_report: Callable[[FleetReport], None] = lambda _: None,
    stopping: Callable[[FleetProfiler], None] = lambda _: None,
) -> DeviceReport:
    """Start an agent, let it measure a bundle, stop it, and return its report.

    Args:
        command: command of the agent. Its options are appended: --id, --broker, --federation, --data, --store,
            --engine and --server-key, of a temporary key.
        bundle: the bundle.
        how: options of the profile.
        on_report: receives each new report.
        stopping: receives the profiler, whose ``stop`` ends the profile early.

    Returns:
        The agent's report. If it has no profile, its state and text give the reason.

    Raises:
        ConfigError: if the command cannot be run.
        BrokerError: if no broker can be started.
    """
    federation = f"profile-{secrets.token_hex(4)}"
    wanted = ProfilingOptions(
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
        files = (
            ("--ca-file", address.ca_file),
            ("--cert-file", address.cert_file),
            ("--key-file", address.key_file),
        )
        options += [word for name, path in files if path for word in (name, path)]
        log = how.folder / "agent.log"
        environment = {PASSWORD: address.password} if address.password else {}
        agent = AgentProcess([*command, *options], log, environment)
        try:
            profiler = FleetProfiler(address, wanted, signer=signer)
            stopping(profiler)
            threading.Thread(target=_watch, args=(agent, profiler), daemon=True).start()
            report = profiler.run(on_report).devices[0]
            return report if report.profile else _with_reason(report, agent, log)
        finally:
            agent.terminate()
            agent.wait(_END_S)
            agent.kill()


def _watch(agent: AgentProcess, profiler: FleetProfiler) -> None:
    """Wait for the end of the agent, then stop the profiler."""
    agent.wait()
    time.sleep(_SETTLE_S)
    profiler.stop()


def _with_reason(report: DeviceReport, agent: AgentProcess, log: Path) -> DeviceReport:
    """Return ``report`` with a text that explains the missing profile, if the agent ended or did not answer."""
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
def _broker(how: AgentProfileOptions) -> Iterator[Address]:
    """Yield the address of the broker in ``how``, or of a temporary broker on this machine."""
    if how.broker is not None:
        yield how.broker
        return
    with lab_broker(how.folder, _BROKER_S) as port:
        yield Address(_HOST, port)

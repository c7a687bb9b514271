"""``edgefl profile`` with ``--device-command``, ``--record`` or ``--import``: profiles of several agents side by side."""

from __future__ import annotations

import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgefl.cli.models.profile_fleet import ProfileOptions, show, shown
from edgefl.cli.output import progress
from edgefl.wire.errors import ConfigError, ParticipationError
from server.profiling.recorded import merged, record
from server.profiling.rows import DeviceReport, FleetReport

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle

HERE = "this-machine"
AGENT = "agent"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ROWS = 64
"""Of the samples that an agent is started with; no profile reads them."""


def profile_beside(bundles: Sequence[Bundle], options: ProfileOptions) -> None:
    """Measure each bundle through the agent, where one is named, and here; show both and what was recorded. An agent that
    gives no profile ends it.

    ConfigError for a command that cannot be started, ParticipationError where the agent gives no profile.
    """
    words = _words(options.command)
    begun, reports = time.monotonic(), list[DeviceReport]()
    for bundle in bundles:
        there = [_through(words, bundle, options)] if words else []
        if any(report.profile is None for report in there):
            reports += there
            break
        reports += [_here(bundle, options, named=not words), *there]
    if options.record and any(report.profile for report in reports):
        record(options.record, reports)
    measured = FleetReport(federation="", seconds=round(time.monotonic() - begun, 3), devices=tuple(reports))
    show(merged(measured, options.imported), "several agents", options)
    if failed := [report for report in reports if report.profile is None]:
        raise ParticipationError(f"{failed[0].device} gave no profile: {failed[0].text}")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"--device-command {command!r} is no command line: {error}", command=command
        ) from error


def _here(bundle: Bundle, options: ProfileOptions, *, named: bool) -> DeviceReport:
    """This machine's own profile; ``named``: it is the one that is called as was asked."""
    with progress() as tell:
        name = f"{bundle.manifest.model}, tier {bundle.manifest.tier}"
        profile = bundle.profile(
            threads=options.threads,
            repeat=options.repeat,
            samples=options.samples,
            progress=lambda part: tell(f"{name}: {part}"),
        )
    return DeviceReport(
        device=options.devices[0] if named and options.devices else HERE,
        tier=profile.tier,
        state="done",
        engines={profile.engine: profile.engine_version},
        profile=profile,
    )


@contextmanager
def _signals_as_before() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _through(words: Sequence[str], bundle: Bundle, options: ProfileOptions) -> DeviceReport:
    """The profile of the agent that the command starts."""
    from device_runtime.profile.measure.inputs import Inputs
    from edgefl.lab.profiled_agent import Through, profiled
    from edgefl.wire.mqtt.topics import checked_name
    from server.profiling.fleet import FleetProfiler

    def stopped_by_signals(profiler: FleetProfiler) -> None:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: profiler.stop())

    with _signals_as_before(), tempfile.TemporaryDirectory(prefix="edgefl-profile-") as name, shown() as tell:
        folder = Path(name)
        data = Inputs(bundle.manifest).samples(_ROWS)
        np.savez(folder / "data.npz", x=data.x, y=data.y, **data.others)  # type: ignore[arg-type]
        how = Through(
            device=checked_name("device", options.devices[0] if options.devices else AGENT),
            data=folder / "data.npz",
            folder=folder,
            broker=options.broker,
            repeat=options.repeat,
            timeout_s=options.timeout_s,
        )
        return profiled(words, bundle.contents, how, tell=tell, stopping=stopped_by_signals)

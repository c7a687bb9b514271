"""``edgefl profile --fleet``: measure the costs of bundles on the devices of a federation."""

from __future__ import annotations

import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from edgefl.api.progress import reporting
from edgefl.cli.output import console, errors, print_json, print_table
from edgefl.cli.output import table as table_of
from edgefl.errors import ConfigError, ParticipationError
from edgefl.system.files import write_text
from edgefl_server.profiling.reports import DeviceReport, FleetReport, merge_reports, record

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle
    from edgefl.wire.bundle.archive import BundleArchive
    from edgefl.wire.bundle.profiles import BundleProfile
    from edgefl.wire.mqtt.address import Address

_MOST_DEVICES_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of a profile by the devices of a federation, or by another agent on this machine.

    Attributes:
        broker: address of the broker; None to start one for the agent.
        federation: name of the federation.
        devices: devices to measure; empty for all.
        repeat: measured calls of each graph.
        timeout_s: seconds to wait for reports.
        threads: threads of the engine.
        samples: rows of the observed round; 0 for two batches.
        command: command that starts the other agent; "" for none.
        sign_key: file with the key that signs bundles; None for the default.
        html: file for a page with pictures.
        as_json: True to print JSON.
        record: file for the reports.
        imported: reports of earlier profiles, to show too.
    """

    broker: Address | None
    federation: str = "demo"
    devices: tuple[str, ...] = ()
    repeat: int = 20
    timeout_s: float = 300.0
    threads: int = 1
    samples: int = 0
    command: str = ""
    sign_key: Path | None = None
    html: Path | None = None
    as_json: bool = False
    record: Path | None = None
    imported: tuple[DeviceReport, ...] = ()


def files_of(targets: Sequence[str]) -> Iterator[str]:
    """Yield ``targets``, with each folder replaced by the paths of its bundles. A run's folder has them in ``bundles``.

    Raises:
        ConfigError: if a folder has no bundle.
    """
    for target in targets:
        path = Path(target)
        if not path.is_dir():
            yield target
            continue
        bundles = sorted((path / "bundles").glob("*.efl")) or sorted(path.glob("*.efl"))
        if not bundles:
            raise ConfigError(f"there is no bundle (*.efl) in {path}: make some with `edgefl export`")
        yield from map(str, bundles)


def refuse(given: Mapping[str, bool], *, fleet: bool, beside: bool = False) -> None:
    """Check that all given options can be combined with the kind of profile.

    Args:
        given: True for each option that is given, by name.
        fleet: True if devices of a federation are measured.
        beside: True if an agent is measured, or recorded profiles are shown.

    Raises:
        ConfigError: if an option cannot be combined; the message names it.
    """
    wrong = [name for name, there in given.items() if there]
    if wrong and beside:
        raise ConfigError(
            f"{wrong[0]} does not go with --device-command, --record or --import: leave it out",
            option=wrong[0],
        )
    if wrong:
        raise ConfigError(
            f"{wrong[0]} is for this machine, and with --fleet the devices measure: leave it out"
            if fleet
            else f"{wrong[0]} is for devices, and this machine measures: add --fleet, or leave it out",
            option=wrong[0],
        )


def profile_fleet(bundles: Sequence[BundleArchive], options: ProfileOptions) -> None:
    """Let the devices of a federation measure bundles, and print or write their reports. Each gets the bundle of its
    tier.

    Raises:
        ConfigError: if an option cannot be used.
        BrokerError: if the broker cannot be reached.
        ParticipationError: if no device answered.
    """
    report = _ask(bundles, options)
    if options.record and report.answered:
        record(options.record, report.devices)
    show(merge_reports(report, options.imported), f"federation {report.federation}", options)
    if not report.answered:
        raise ParticipationError(_no_answer_text(report, options))


def show(report: FleetReport, of: str, options: ProfileOptions) -> None:
    """Print the devices' profiles as tables or JSON, and write the page if one is requested. ``of``: subject of the
    title.
    """
    if options.as_json:
        print_json(report)
    else:
        _print(report, of)
    if options.html and report.answered:
        _write_page(report, of, options.html)
        errors.print(f"page: {options.html}")


def _ask(bundles: Sequence[BundleArchive], options: ProfileOptions) -> FleetReport:
    from edgefl.wire import folders
    from edgefl.wire.bundle.archive import Signer
    from edgefl.wire.mqtt.messages import MOST_REPEATS
    from edgefl.wire.mqtt.topics import checked_name
    from edgefl_server.profiling.fleet import FleetProfiler, ProfilingOptions
    from edgefl_server.profiling.reports import by_tier

    if options.repeat > MOST_REPEATS:
        raise ConfigError(
            f"a device repeats a graph {MOST_REPEATS} times at most, found --repeat {options.repeat}"
        )
    if options.sign_key and not options.sign_key.is_file():
        raise ConfigError(
            f"there is no key {options.sign_key}: name the file that the server of the federation signs with",
            path=str(options.sign_key),
        )
    key = options.sign_key or folders.server_key(checked_name("federation", options.federation))
    wanted = ProfilingOptions(
        federation=checked_name("federation", options.federation),
        offered=by_tier(bundles),
        devices=frozenset(checked_name("device", device) for device in options.devices),
        repeat=options.repeat,
        timeout_s=options.timeout_s,
    )
    with shown() as tell:
        assert options.broker is not None
        signer = Signer(key) if key.is_file() else None
        profiler = FleetProfiler(options.broker, wanted, signer=signer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: profiler.stop())
        return profiler.run(tell)


@contextmanager
def shown() -> Iterator[Callable[[FleetReport], None]]:
    """Open a context with a function that shows a changing report on standard error: a table on a terminal, else lines."""
    from rich.live import Live

    if errors.is_terminal:
        with Live(console=errors, transient=True, auto_refresh=False) as live:
            yield lambda report: live.update(_progress(report), refresh=True)
    else:
        with reporting() as line:
            yield lambda report: line(_answer_text(report))


def _answer_text(report: FleetReport) -> str:
    return f"{len(report.answered)} of {len(report.devices)} devices answered"


def _progress(report: FleetReport) -> Any:
    shown = report.devices[:_MOST_DEVICES_LISTED]
    more = len(report.devices) - len(shown)
    listed = [{"device": row.device, "tier": row.tier, "state": row.state} for row in shown]
    return table_of(_answer_text(report), listed, f"and {more} more" if more else "")


def _print(report: FleetReport, of: str) -> None:
    from edgefl.analysis.profiles import rows

    if report.answered:
        print_table(f"{of[:1].upper()}{of[1:]}: a training step", [_times(row) for row in report.answered])
        print_table("Memory, loading, energy", [_means(row) for row in report.answered])
    if report.silent:
        print_table("No profile", [_reason(row) for row in report.silent])
    for row in report.answered:
        assert row.profile is not None
        for note in rows.notes(row.profile):
            console.print(f"{row.device}: {note}")


def _times(row: DeviceReport) -> dict[str, str]:
    """Return the table row of a device with the times of its slowest training step and of that step's parts."""
    from edgefl.analysis.profiles import rows

    profile = row.profile
    assert profile is not None
    step = profile.slowest
    parts = ("forward_ms", "backward_ms", "update_ms")
    split = step.split if step else None
    return {
        "device": row.device,
        "tier": profile.tier,
        "engine": f"{profile.engine} {profile.engine_version}",
        "step ms": rows.ms(step.run.median_ms) if step else "-",
        "p90 ms": rows.ms(step.run.p90_ms) if step else "-",
        **{part.replace("_", " "): rows.ms(getattr(split, part)) if split else "-" for part in parts},
    }


def _means(row: DeviceReport) -> dict[str, str]:
    """Return the table row of a device with the largest memory of its graphs by each measure, load time, and energy."""
    from edgefl.analysis.profiles import rows

    profile = row.profile
    assert profile is not None
    step, peaks = profile.slowest, [graph.peak for graph in profile.graphs]
    return {
        "device": row.device,
        "planned MiB": rows.mib(profile.planned_bytes),
        "engine MiB": rows.mib(max((peak.engine_bytes for peak in peaks), default=0)),
        "measured MiB": rows.mib(profile.peak_bytes),
        "idle MiB": rows.mib(profile.idle_bytes),
        "load ms": rows.ms(step.load_ms) if step else "-",
        "energy J": "-" if step is None or step.energy_j is None else f"{step.energy_j:.3g}",
    }


def _reason(row: DeviceReport) -> dict[str, str]:
    state = f"{row.state} ({row.reason})" if row.reason else row.state
    return {"device": row.device, "tier": row.tier or "-", "state": state, "why": row.text}


def _write_page(report: FleetReport, of: str, path: Path) -> None:
    from edgefl.analysis.profiles.rows import page

    named = [(f"{row.device} ({row.tier})", row.profile) for row in report.answered]
    profiles: list[BundleProfile] = [profile for _, profile in named if profile is not None]
    notes = [f"{row.device}: no profile, {row.state} {row.reason}: {row.text}" for row in report.silent]
    title = f"Profile of {of}"
    written = page(title, profiles, names=[name for name, _ in named], notes=notes)
    write_text(path, written)


def _no_answer_text(report: FleetReport, options: ProfileOptions) -> str:
    if not report.devices:
        return (
            f"no device of federation {report.federation!r} is known to the broker at {options.broker}: start some with "
            "`edgefl device`, or check --federation and --broker"
        )
    return (
        f"none of {len(report.devices)} devices of federation {report.federation!r} answered with a profile"
    )


HERE = "this-machine"
AGENT = "agent"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_ROWS = 64
"""Of the samples that an agent is started with; no profile reads them."""


def profile_beside(bundles: Sequence[Bundle], options: ProfileOptions) -> None:
    """Measure each bundle on this machine and, if ``options.command`` is set, by that agent. Print them with recorded
    profiles.

    It stops at the first bundle for which the agent gives no profile, prints the others, and raises the error.

    Raises:
        ConfigError: if the command cannot be started.
        ParticipationError: if the agent gives no profile.
    """
    words = _words(options.command)
    begun, reports = time.monotonic(), list[DeviceReport]()
    for bundle in bundles:
        there = [_measure_by_agent(words, bundle, options)] if words else []
        if any(report.profile is None for report in there):
            reports += there
            break
        reports += [_measure_here(bundle, options, named=not words), *there]
    if options.record and any(report.profile for report in reports):
        record(options.record, reports)
    measured = FleetReport(federation="", seconds=round(time.monotonic() - begun, 3), devices=tuple(reports))
    show(merge_reports(measured, options.imported), "several agents", options)
    if failed := [report for report in reports if report.profile is None]:
        raise ParticipationError(f"{failed[0].device} gave no profile: {failed[0].text}")


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"--device-command {command!r} is no command line: {error}", command=command
        ) from error


def _measure_here(bundle: Bundle, options: ProfileOptions, *, named: bool) -> DeviceReport:
    """Measure a bundle on this machine and return the report.

    ``named``: True to name it like the first requested device, False for a fixed name.
    """
    profile = bundle.profile(threads=options.threads, repeat=options.repeat, samples=options.samples)
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


def _measure_by_agent(words: Sequence[str], bundle: Bundle, options: ProfileOptions) -> DeviceReport:
    """Start the agent whose command line is ``words``, let it measure the bundle, and return its report."""
    from edgefl.lab.profiled_agent import AgentProfileOptions, profile_by_agent
    from edgefl.wire.mqtt.topics import checked_name
    from edgefl_device.profile.measure.inputs import RandomInputs
    from edgefl_server.profiling.fleet import FleetProfiler

    def stopped_by_signals(profiler: FleetProfiler) -> None:
        for number in _SIGNALS:
            signal.signal(number, lambda *_: profiler.stop())

    with _signals_as_before(), tempfile.TemporaryDirectory(prefix="edgefl-profile-") as name, shown() as tell:
        folder = Path(name)
        data = RandomInputs(bundle.manifest).samples(_ROWS)
        np.savez(folder / "data.npz", x=data.x, y=data.y, **data.others)  # type: ignore[arg-type]
        how = AgentProfileOptions(
            device=checked_name("device", options.devices[0] if options.devices else AGENT),
            data=folder / "data.npz",
            folder=folder,
            broker=options.broker,
            repeat=options.repeat,
            timeout_s=options.timeout_s,
        )
        return profile_by_agent(words, bundle.contents, how, on_report=tell, stopping=stopped_by_signals)

"""Profile of a whole bundle: one process for each part, results combined."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edgefl.errors import BundleError, ConfigError, DataError, EdgeflError
from edgefl.system.processes import sign_of_life
from edgefl.wire.bundle.archive import BundleArchive
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.bundle.profiles import BundleProfile, GraphProfile, MachineInfo
from edgefl.wire.mqtt.messages import MALFORMED
from edgefl_device.host import physical_memory
from edgefl_device.profile.measure.folder import BundleFolder
from edgefl_device.profile.measure.graph import kinds
from edgefl_device.profile.measure.meters import open_meter
from edgefl_device.profile.measure.round import GRAPH, ROUND, ProcessResult
from edgefl_device.sandbox.confine import Confinement
from edgefl_device.sandbox.process import StderrTail, command, environment

_ERRORS: dict[int, type[EdgeflError]] = {
    kind.exit_code: kind for kind in (ConfigError, DataError, BundleError)
}
_MOST_BYTES = 16 << 20
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """Settings of a profile.

    Attributes:
        engine: Format to run; "": that of the bundle.
        threads: Threads of the engine.
        repeat: Measured calls of each graph.
        samples: Local rows of the measured round; 0: two batches.
        limit_s: Longest time of one process in seconds.
        confinement: Rights of each process, whose writable folder becomes the bundle's; None: those of this
            process.
    """

    engine: str = ""
    threads: int = 1
    repeat: int = 20
    samples: int = 0
    limit_s: float = 600.0
    confinement: Confinement | None = None

    def checked(self) -> ProfileSettings:
        """Return these settings.

        Raises:
            ConfigError: A value is out of range.
        """
        if self.threads < 1 or self.repeat < 1 or self.samples < 0:
            raise ConfigError(
                f"threads and repeat are at least 1 and samples at least 0, found {self.threads}, {self.repeat} and "
                f"{self.samples}"
            )
        return self


def profile_bundle(
    bundle: BundleArchive, settings: ProfileSettings, progress: Callable[[str], None] = lambda _: None
) -> BundleProfile:
    """Measure every graph of ``bundle`` and one short round, each in a new process of some seconds.

    Args:
        bundle: The bundle.
        settings: Engine, threads and repetitions.
        progress: Receives the name of each part before it is measured.

    Raises:
        ConfigError: The engine is not installed, or a setting is out of range.
        BundleError: The engine does not run the bundle's format, or a process ends without a result.
    """
    engine = _engine(bundle.manifest, settings.checked().engine)
    with tempfile.TemporaryDirectory(prefix="edgefl-profile-") as place:
        folder = BundleFolder.unpacked(bundle, Path(place))

        def measured(part: str) -> ProcessResult:
            progress(part.removeprefix(GRAPH))
            return _run(folder, part, engine, settings)

        whole = measured(ROUND)
        parts = [measured(GRAPH + name) for name in kinds(bundle.manifest)]
        return _assemble(folder, engine, settings, whole, parts)


def _engine(manifest: Manifest, wanted: str) -> str:
    formats = sorted({graph.format for graph in manifest.graphs})
    if len(formats) != 1:
        raise BundleError(f"a bundle has one format, this one has {', '.join(formats)}; export it again")
    if wanted and wanted != formats[0]:
        raise BundleError(
            f"the bundle holds {formats[0]} graphs, engine {wanted!r} does not run them: leave out `engine`, or export "
            f"with `format` {wanted}",
            format=formats[0],
            engine=wanted,
        )
    return formats[0]


def _run(folder: BundleFolder, part: str, engine: str, settings: ProfileSettings) -> ProcessResult:
    """Measure one part of a bundle in a new process, and return its result. Raise the error that the process reports.

    Args:
        folder: The unpacked bundle.
        part: ``round``, or ``graph:`` and the name of a graph.
        engine: Format to run.
        settings: Threads, repetitions and rights of the process.
    """
    out = folder.path / "part.msgpack"
    out.unlink(missing_ok=True)
    arguments = [str(folder.path), part, "--engine", engine]
    arguments += ["--threads", str(settings.threads), "--repeat", str(settings.repeat)]
    arguments += ["--samples", str(settings.samples), "--out", str(out), "--with-parent"]
    if settings.confinement is not None:
        bounds = dataclasses.replace(settings.confinement, writable=str(folder.path))
        arguments += ["--confinement", msgspec.json.encode(bounds).decode()]
    code, lines = _run_process(command("edgefl_device.profile", *arguments), folder, settings, part)
    if code or not out.exists():
        kind = _ERRORS.get(code, BundleError)
        words = lines[-1] if lines else "it said nothing"
        raise kind(f"{part} was not measured: {words}", part=part, exit_code=code)
    return _read(out, part)


def _read(out: Path, part: str) -> ProcessResult:
    """Return the result that a process wrote to ``out``.

    BundleError if there is none, as after a crash in a graph, or if it is too large; ``part`` names the profiled part
    for the error.
    """
    try:
        if out.stat().st_size > _MOST_BYTES:
            raise BundleError(f"{part}: its profile takes more than {_MOST_BYTES} bytes", part=part)
        return msgspec.msgpack.decode(out.read_bytes(), type=ProcessResult)
    except MALFORMED as error:
        raise BundleError(f"{part}: its profile cannot be read: {error}", part=part) from error


def _run_process(
    command: Sequence[str], folder: BundleFolder, settings: ProfileSettings, part: str
) -> tuple[int, list[str]]:
    """Run ``command``; return (exit code, last error lines). Kill the process if the wait ends early."""
    # What it leaves when it is killed goes with the folder.
    variables = {"OMP_NUM_THREADS": str(settings.threads), "TMPDIR": str(folder.path)}
    with (
        sign_of_life() as line,
        subprocess.Popen(
            command,
            stdin=line,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder.path,
            env=os.environ | environment() | variables,  # of an agent's these are all
            start_new_session=True,
        ) as process,
    ):
        assert process.stderr is not None
        complaints = StderrTail(process.stderr)
        try:
            process.wait(timeout=settings.limit_s)
        except subprocess.TimeoutExpired as error:
            raise BundleError(
                f"{part} was not measured within {settings.limit_s:g} s; choose a smaller `repeat`",
                part=part,
                limit_s=settings.limit_s,
            ) from error
        finally:
            process.kill()
            process.wait()
        return process.returncode, complaints.lines()


def _assemble(
    folder: BundleFolder,
    engine: str,
    settings: ProfileSettings,
    whole: ProcessResult,
    parts: list[ProcessResult],
) -> BundleProfile:
    manifest, seen = folder.manifest, whole.round
    assert seen is not None
    graphs: tuple[GraphProfile, ...] = tuple(part.graph for part in parts if part.graph is not None)
    return BundleProfile(
        bundle=folder.digest,
        model=manifest.model,
        program=manifest.program,
        tier=manifest.tier,
        exchange=manifest.exchange,
        batch=manifest.batch,
        parameters=manifest.parameters,
        engine=engine,
        engine_version=whole.version,
        threads=settings.threads,
        machine=machine(),
        idle_bytes=seen.idle_bytes,
        peak_bytes=max(seen.peak_bytes - seen.idle_bytes, *(graph.peak.rss_bytes for graph in graphs)),
        open_ms=round(statistics.median([whole.open_ms, *(part.open_ms for part in parts)]), 3),
        artifact_bytes=sum({graph.blob.sha256: graph.blob.size for graph in manifest.graphs}.values()),
        energy_how=open_meter().how,
        graphs=graphs,
        io=seen.io,
        timeline=seen.timeline,
    )


def machine() -> MachineInfo:
    """Return the facts about this machine that the system reports: processor, cores, memory, operating system."""
    return MachineInfo(
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=physical_memory(),
        system=f"{platform.system()} {platform.machine()}",
    )


def _processor() -> str:
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(names, platform.processor() or platform.machine())

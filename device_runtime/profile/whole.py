"""A bundle's whole profile: one process after another, put together."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from device_runtime.host import physical_memory
from device_runtime.profile.measure.energy import open_meter
from device_runtime.profile.measure.folder import BundleFolder
from device_runtime.profile.measure.graph import kinds
from device_runtime.profile.measure.parts import GRAPH, ROUND, Part
from edgefl.system.parent import sign_of_life
from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.bundle.profiles import BundleProfile, GraphProfile, Machine
from edgefl.wire.errors import BundleError, ConfigError, DataError, EdgeflError

_ERRORS: dict[int, type[EdgeflError]] = {
    kind.exit_code: kind for kind in (ConfigError, DataError, BundleError)
}
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """``engine`` "": the one of the bundle's format. ``samples`` 0: two batches. ``limit_s`` is for one process."""

    engine: str = ""
    threads: int = 1
    repeat: int = 20
    samples: int = 0
    limit_s: float = 600.0

    def checked(self) -> ProfileSettings:
        """These settings; ConfigError for one that cannot be used."""
        if self.threads < 1 or self.repeat < 1 or self.samples < 0:
            raise ConfigError(
                f"threads and repeat are at least 1 and samples at least 0, found {self.threads}, {self.repeat} and "
                f"{self.samples}"
            )
        return self


def profile_bundle(
    bundle: Bundle, settings: ProfileSettings, progress: Callable[[str], None] = lambda _: None
) -> BundleProfile:
    """Measure every graph of ``bundle`` and one short round. Some seconds for each.

    ConfigError if the engine is not installed, BundleError if it does not run the bundle's format or a process ends
    without a result.
    """
    engine = _engine(bundle.manifest, settings.checked().engine)
    with tempfile.TemporaryDirectory(prefix="edgefl-profile-") as place:
        folder = BundleFolder.unpacked(bundle, Path(place))

        def measured(part: str) -> Part:
            progress(part.removeprefix(GRAPH))
            return _run(folder, part, engine, settings)

        whole = measured(ROUND)
        parts = [measured(GRAPH + name) for name in kinds(bundle.manifest)]
        return _assembled(folder, engine, settings, whole, parts)


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


def _run(folder: BundleFolder, part: str, engine: str, settings: ProfileSettings) -> Part:
    """One part in a process of its own."""
    out = folder.path / "part.msgpack"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "device_runtime.profile", str(folder.path), part, "--engine", engine]
    command += ["--threads", str(settings.threads), "--repeat", str(settings.repeat)]
    command += ["--samples", str(settings.samples), "--out", str(out), "--with-parent"]
    code, words = _ended(command, folder, settings, part)
    if code or not out.exists():
        lines = words.strip().splitlines() or ["it said nothing"]
        kind = _ERRORS.get(code, BundleError)
        raise kind(f"{part} was not measured: {lines[-1]}", part=part, exit_code=code)
    return msgspec.msgpack.decode(out.read_bytes(), type=Part)


def _ended(
    command: Sequence[str], folder: BundleFolder, settings: ProfileSettings, part: str
) -> tuple[int, str]:
    """The exit code of a process and what it complained of. Whatever ends the wait for it ends the process too."""
    # What it leaves when it is killed goes with the folder.
    variables = {"OMP_NUM_THREADS": str(settings.threads), "TMPDIR": str(folder.path)}
    with (
        sign_of_life() as line,
        subprocess.Popen(
            command,
            stdin=line,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | variables,
        ) as process,
    ):
        try:
            words = process.communicate(timeout=settings.limit_s)[1]
        except subprocess.TimeoutExpired as error:
            raise BundleError(
                f"{part} was not measured within {settings.limit_s:g} s; choose a smaller `repeat`"
            ) from error
        finally:
            process.kill()
            process.wait()
    return process.returncode, words.decode(errors="replace")


def _assembled(
    folder: BundleFolder, engine: str, settings: ProfileSettings, whole: Part, parts: list[Part]
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


def machine() -> Machine:
    """This machine, as far as the system tells."""
    return Machine(
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

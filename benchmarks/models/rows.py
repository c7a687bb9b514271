"""Results of the architectures: one process for each, one row for each, kept in a file as soon as it is finished."""

from __future__ import annotations

import os
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from benchmarks.machine import machine
from benchmarks.models.architecture import OUTSIDE, Architecture, Library, installed
from benchmarks.models.catalog import named
from edgefl.api.check import Verdict, check
from edgefl.api.model import Model
from edgefl.api.training import Target
from edgefl.contract.choice import LossChoice
from edgefl.errors import ConfigError
from edgefl.setup.federation_options import parse_loss
from edgefl.system.files import write_whole
from edgefl.system.processes import last_line
from edgefl_export.compiler.cache import FOLDER

ENGINES: tuple[Target, ...] = ("onnx", "executorch")
LIMIT_S = 300.0
_PACKAGES = ("torch", "onnxruntime", "executorch")
_POLL_S = 0.5
_FOLDERS = re.compile(r"[^\s('\"]*/(?:site-packages/|(?=edgefl/))")
"""Beginning of a path on this machine."""


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's part of a row.

    ``problem``: reason why it cannot train the architecture, "" if it can and agrees with torch. Then ``step_ms`` is the
    median training step, and ``max_rel_error`` the largest error of an output beside torch.
    """

    problem: str = ""
    step_ms: float = 0.0
    max_rel_error: float = 0.0
    nbytes: int = 0


class SuiteRow(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture.

    Attributes:
        parameters, units: numbers of parameters and units; 0: it could not be cut.
        loss: loss of the training.
        torch_ms: torch's own training step in milliseconds.
        engines: results by name.
        seconds: time of the whole trial.
        load: load average per core during the trial; null: unknown.
    """

    library: Library
    name: str
    kind: str
    parameters: int = 0
    units: int = 0
    inputs: int = 1
    loss: str = ""
    torch_ms: float = 0.0
    engines: dict[str, EngineResult]
    batch: int
    seconds: float
    load: float | None = None
    processor: str
    versions: dict[str, str]

    @property
    def path(self) -> str:
        """Name of the architecture, ``library/name``."""
        return f"{self.library}/{self.name}"

    def lacks(self, engines: Sequence[Target]) -> tuple[Target, ...]:
        """Return the engines without a result."""
        return tuple(each for each in engines if each not in self.engines)

    def with_more(self, other: SuiteRow) -> SuiteRow:
        """Return ``other``, a later row of the same architecture, with this row's other engines."""
        both = {**self.engines, **other.engines}
        engines = {name: both[name] for name in ENGINES if name in both}
        return msgspec.structs.replace(other, engines=engines, seconds=self.seconds + other.seconds)

    def works_on(self, engine: str) -> bool:
        """Return True if the engine was tried and trains it."""
        return engine in self.engines and not self.engines[engine].problem


@dataclass(frozen=True)
class SuiteSettings:
    """Settings: ``limit_s`` seconds for one architecture, on all engines, and ``batch`` rows of a step."""

    engines: Sequence[Target] = ENGINES
    batch: int = 8
    limit_s: float = LIMIT_S


def left_out(architectures: Sequence[Architecture]) -> dict[Library, int]:
    """Return the libraries that are not installed, with the number of their ``architectures``."""
    return dict(
        Counter(
            each.library for each in architectures if each.library in OUTSIDE and not installed(each.library)
        )
    )


def read(path: Path) -> dict[str, SuiteRow]:
    """Read the rows of a file by ``library/name``; none if it does not exist. Raises ConfigError for another file."""
    if not path.exists():
        return {}
    try:
        rows = [msgspec.json.decode(line, type=SuiteRow) for line in path.read_bytes().splitlines() if line]
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} holds no rows of the suite ({error}); name another file", path=str(path)
        ) from error
    return {row.path: row for row in rows}


def write(path: Path, rows: Mapping[str, SuiteRow]) -> None:
    """Write the rows as lines of JSON, atomically."""
    write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows.values()))


def try_architecture(
    architecture: Architecture, settings: SuiteSettings, say: Callable[[str], None] = lambda _: None
) -> SuiteRow:
    """Try one architecture in a process of its own, which is killed after its time limit."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgefl-suite-") as name:
        folder = Path(name)
        (folder / FOUND).touch()
        code = _run(architecture, settings, folder, say)
        ending = _ending(code, folder, settings)
        return _row(architecture, settings, folder / FOUND, ending, time.monotonic() - start)


def _run(
    architecture: Architecture, settings: SuiteSettings, folder: Path, say: Callable[[str], None]
) -> int | None:
    """Run the process; return its exit code, or None after its time limit."""
    process = _processes().Process(
        target=work, args=(architecture.path, settings.batch, tuple(settings.engines), folder)
    )
    process.start()
    end = time.monotonic() + settings.limit_s
    try:
        while process.exitcode is None and (left := end - time.monotonic()) > 0:
            process.join(min(_POLL_S, left))
            say(f"{architecture.path}: {_stage(folder)}")
        return process.exitcode
    finally:
        process.kill()
        process.join()


@cache
def _processes() -> ForkServerContext:
    """Return a fork server with the common imports, which take longer than many models."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        [
            "benchmarks.models.rows",
            "edgefl_export.onnx.model",
            "edgefl_export.executorch",
            "transformers",
            "onnxruntime",
        ]
    )
    return context


def _lines(found: Path) -> list[dict[str, Any]]:
    """Return the complete lines that the process wrote so far."""
    whole = found.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line) for line in whole.splitlines()]


def _stage(folder: Path) -> str:
    stages = [line["stage"] for line in _lines(folder / FOUND) if "stage" in line]
    return cast(str, stages[-1]) if stages else "starting"


def _ending(code: int | None, folder: Path, settings: SuiteSettings) -> str:
    """Return the reason of an early end, or "" after a normal end."""
    if code == 0:
        return ""
    stage = _stage(folder)
    if code is None:
        return f"no end within {settings.limit_s:.0f} s, while {stage}"
    log = folder / LOG
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"{stage}: {last_line(text, f'the process ended with {code}')}"


def _load() -> float | None:
    """Return the load average per core of the last minute; None if the system has none."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except (AttributeError, OSError):
        return None


def _row(
    architecture: Architecture, settings: SuiteSettings, found: Path, ending: str, seconds: float
) -> SuiteRow:
    verdicts = [line["verdict"] for line in _lines(found) if "verdict" in line]
    verdict = verdicts[-1] if verdicts else {}
    engines = {
        each["engine"]: EngineResult(
            problem=_FOLDERS.sub("", each["problem"]),
            step_ms=round(each["step_ms"], 3),
            max_rel_error=each["max_rel_error"],
            nbytes=each["nbytes"],
        )
        for each in verdict.get("engines", ())
    }
    problem = _FOLDERS.sub("", verdict.get("problem") or ending or "it was not tried")
    described = machine()
    packages = cast(dict[str, str], described["packages"])
    return SuiteRow(
        library=architecture.library,
        name=architecture.name,
        kind=architecture.kind,
        parameters=verdict.get("parameters", 0),
        units=len(verdict.get("units", ())),
        inputs=len(verdict.get("inputs", ())) or 1,
        loss=verdict.get("loss", ""),
        torch_ms=round(verdict.get("torch_ms", 0.0), 3),
        engines={name: engines.get(name, EngineResult(problem=problem)) for name in settings.engines},
        batch=settings.batch,
        seconds=round(seconds, 1),
        load=_load(),
        processor=str(described["processor"]),
        versions={
            **{name: packages[name] for name in _PACKAGES if name in packages},
            **{name: installed(name) for name in (architecture.library,) if name != "plain"},
        },
    )


SEED = 0
FOUND, LOG, CACHE = "found.jsonl", "log", "cache"
"""Files of the process's folder: its results, its output, and its bundle cache."""


def work(path: str, batch: int, engines: Sequence[Target], folder: Path) -> None:
    """Try the architecture ``path`` in this process, and write results to ``folder`` as lines of JSON.

    ``{"stage": ...}`` comes before each part, and ``{"verdict": ...}`` after each engine, so that results survive a crash or
    a timeout.
    """
    os.environ[FOLDER] = str(folder / CACHE)
    with (folder / LOG).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        torch.set_num_threads(1)
        try:
            _try(named(path), batch, engines, folder / FOUND)
        except Exception as error:
            traceback.print_exc()
            raise SystemExit(1) from error


def _try(architecture: Architecture, batch: int, engines: Sequence[Target], file: Path) -> None:
    def write(**values: object) -> None:
        with file.open("ab") as stream:
            stream.write(msgspec.json.encode(values) + b"\n")

    def write_verdict(verdict: Verdict) -> None:
        write(verdict=asdict(verdict))

    write(stage="building the model")
    torch.manual_seed(SEED)
    verdict = check(
        Model(architecture.make(), sample=architecture.sample, classes=architecture.classes),
        loss=LossChoice(**parse_loss(architecture.loss)) if architecture.loss else None,
        batch=batch,
        seed=SEED,
        engines=engines,
        progress=lambda text: write(stage=text),
        so_far=write_verdict,
    )
    write_verdict(verdict)  # also a verdict without engines

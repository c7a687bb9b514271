"""The suite's results: one process for each architecture, one row for each, kept in a file as soon as it is there."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, cast

import msgspec

from benchmarks.common.machine import machine
from benchmarks.suite.architecture import OUTSIDE, Architecture, Library, installed
from benchmarks.suite.worker import FOUND, LOG, work
from edgefl.api.training import Target
from edgefl.errors import ConfigError
from edgefl.system.files import write_whole
from edgefl.system.processes import last_line

ENGINES: tuple[Target, ...] = ("onnx", "executorch")
LIMIT_S = 300.0
_PACKAGES = ("torch", "onnxruntime", "executorch")
_POLL_S = 0.5
_FOLDERS = re.compile(r"[^\s('\"]*/(?:site-packages/|(?=edgefl/))")
"""What a path begins with on this machine."""


class EngineResult(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's half of a row. ``problem``: why it cannot train the architecture, "" if it can and agrees with torch;
    then ``step_ms`` is the median training step, ``max_rel_error`` the largest error of an output beside torch."""

    problem: str = ""
    step_ms: float = 0.0
    max_rel_error: float = 0.0
    nbytes: int = 0


class SuiteRow(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture: ``parameters`` and ``units`` by number (0: it could not be cut), the ``loss`` it was trained by,
    torch's own training step ``torch_ms`` in milliseconds, the ``engines`` by name, and what it was tried with.
    ``seconds``: of all. ``load``: algorithms that waited for each core meanwhile, this one among them; null: not known."""

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
        return f"{self.library}/{self.name}"

    def lacks(self, engines: Sequence[Target]) -> tuple[Target, ...]:
        """Those of the engines that it was not tried on."""
        return tuple(each for each in engines if each not in self.engines)

    def with_more(self, other: SuiteRow) -> SuiteRow:
        """This row with the engines of ``other``, a later one of the same architecture."""
        both = {**self.engines, **other.engines}
        engines = {name: both[name] for name in ENGINES if name in both}
        return msgspec.structs.replace(other, engines=engines, seconds=self.seconds + other.seconds)

    def works_on(self, engine: str) -> bool:
        """Whether the engine was tried and trains it."""
        return engine in self.engines and not self.engines[engine].problem


@dataclass(frozen=True)
class SuiteSettings:
    """``limit_s``: seconds for one architecture, on all engines; ``batch``: rows of a step."""

    engines: Sequence[Target] = ENGINES
    batch: int = 8
    limit_s: float = LIMIT_S


def left_out(architectures: Sequence[Architecture]) -> dict[Library, int]:
    """The libraries that are not installed, with the number of ``architectures`` that nobody can try without them."""
    return dict(
        Counter(
            each.library for each in architectures if each.library in OUTSIDE and not installed(each.library)
        )
    )


def read(path: Path) -> dict[str, SuiteRow]:
    """The rows of a file by ``library/name``, none if it is not there; ConfigError for another file."""
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
    """The rows as lines of JSON, whole or not at all."""
    write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows.values()))


def tried(
    architecture: Architecture, settings: SuiteSettings, tell: Callable[[str], None] = lambda _: None
) -> SuiteRow:
    """One architecture's row, made by a process of its own, which is ended when its time is over."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgefl-suite-") as name:
        folder = Path(name)
        (folder / FOUND).touch()
        code = _run(architecture, settings, folder, tell)
        ending = _ending(code, folder, settings)
        return _row(architecture, settings, folder / FOUND, ending, time.monotonic() - start)


def _run(
    architecture: Architecture, settings: SuiteSettings, folder: Path, tell: Callable[[str], None]
) -> int | None:
    """The exit code of the process, None if it was ended."""
    process = _processes().Process(
        target=work, args=(architecture.path, settings.batch, tuple(settings.engines), folder)
    )
    process.start()
    end = time.monotonic() + settings.limit_s
    try:
        while process.exitcode is None and (left := end - time.monotonic()) > 0:
            process.join(min(_POLL_S, left))
            tell(f"{architecture.path}: {_stage(folder)}")
        return process.exitcode
    finally:
        process.kill()
        process.join()


@cache
def _processes() -> ForkServerContext:
    """Processes that begin with what all of them need imported already: that takes longer than many a model."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        [
            "benchmarks.suite.worker",
            "edgefl_export.onnx.model",
            "edgefl_export.executorch",
            "transformers",
            "onnxruntime",
        ]
    )
    return context


def _lines(found: Path) -> list[dict[str, Any]]:
    """What the process wrote so far; a line that is not whole is not there yet."""
    whole = found.read_bytes().rpartition(b"\n")[0]
    return [msgspec.json.decode(line) for line in whole.splitlines()]


def _stage(folder: Path) -> str:
    stages = [line["stage"] for line in _lines(folder / FOUND) if "stage" in line]
    return cast(str, stages[-1]) if stages else "starting"


def _ending(code: int | None, folder: Path, settings: SuiteSettings) -> str:
    """Why the process found no more than it did; "" if it ended by itself and well."""
    if code == 0:
        return ""
    stage = _stage(folder)
    if code is None:
        return f"no end within {settings.limit_s:.0f} s, while {stage}"
    log = folder / LOG
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return f"{stage}: {last_line(text, f'the process ended with {code}')}"


def _load() -> float | None:
    """Of the last minute; None where the system does not count it."""
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

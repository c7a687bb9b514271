"""Runs of entries in processes side by side, and their records: one JSON-lines file for each entry.

A run that was stopped at any moment resumes from its simulation's folder. A finished run is one line of the file, and its
folder is deleted.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.machine import processor
from edgefl.errors import ConfigError, DivergedError, EdgeflError
from edgefl.system.distribution import version
from edgefl.system.files import FolderLock, write_whole
from reproduce.catalog import ENTRIES
from reproduce.entry import DIVERGED, SCALES, Arm, ArmRun, Entry, Federated, Measurements, Results, Scale

WORK = "runs"
_TICK_S = 0.5
_POINTS = 500


class Task(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run: an arm of an entry at a scale, with a seed. ``device``: processor that trains, ``cpu`` or ``cuda``."""

    entry: str
    arm: str
    scale: Scale
    seed: int
    device: str = "cpu"

    @property
    def label(self) -> str:
        """Entry, arm and seed as text."""
        return f"{self.entry}, {self.arm}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        """Return the folder of the run's intermediate files below ``out``."""
        arm = re.sub(r"[^\w.=-]", "-", self.arm, flags=re.ASCII)
        return out / WORK / self.scale / self.entry / arm / str(self.seed)


class Record(Task, frozen=True, kw_only=True, omit_defaults=True):
    """Result of a run.

    Attributes:
        settings: the federation's by dotted key, or the computation's.
        started: UTC, ISO 8601.
        cpu_seconds: processor time of the run, with that before interruptions.
    """

    settings: dict[str, Any]
    figures: dict[str, float]
    lines: dict[str, list[tuple[float, float]]] = {}
    data: str = ""
    started: str = ""
    cpu_seconds: float = 0.0
    processor: str = ""
    version: str = ""


Listener = Callable[[Task, int, "str | Record"], None]
"""Function that is called with a task, the number of all tasks, and a message or the record of the run that has ended."""


def settings_of(arm: Arm) -> dict[str, Any]:
    """Return the settings of an arm as they are written in its records."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(arm.settings)))
    return plain


def records_file(out: Path, name: str) -> Path:
    """Return the path of an entry's records."""
    return out / f"{name}.jsonl"


def read_records(entry: Entry, out: Path) -> list[Record]:
    """Return the records of an entry whose settings are still those of its arms. ConfigError for a damaged file."""
    found = _all_records(records_file(out, entry.runs))
    scales = {record.scale for record in found}
    current = {(scale, arm.name): settings_of(arm) for scale in scales for arm in entry.arms(scale)}
    return [each for each in found if current.get((each.scale, each.arm)) == each.settings]


def _all_records(path: Path) -> list[Record]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    try:
        return [msgspec.json.decode(line, type=Record) for line in lines if line.strip()]
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"expected records in {path}, found {error}; delete the line", path=str(path)
        ) from error


def add_records(new: Sequence[Record], entry: Entry, out: Path) -> None:
    """Add records to an entry's file, in one atomic step; a new one replaces that of the same run.

    Other commands may add to the same file meanwhile. Records of other settings than the arms' stay, and do not count.
    """
    path = records_file(out, entry.runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(path.parent, f"{path.stem}.lock", patience_s=60)
    try:
        both = [*_all_records(path), *new]
        kept = {(r.scale, r.arm, r.seed, msgspec.json.encode(r.settings)): r for r in both}
        order = {arm.name: at for scale in SCALES for at, arm in enumerate(entry.arms(scale))}
        sort = sorted(kept.values(), key=lambda r: (r.scale, order.get(r.arm, 0), r.arm, r.seed))
        write_whole(path, b"".join(msgspec.json.encode(record) + b"\n" for record in sort))
    finally:
        lock.release()


def results_of(records: Sequence[Record]) -> Results:
    """Return the measurements of records of one scale."""
    runs: dict[str, dict[int, Measurements]] = {}
    for each in records:
        runs.setdefault(each.arm, {})[each.seed] = Measurements(each.figures, each.lines)
    return Results(runs)


def run_entries(
    entries: Sequence[Entry],
    out: Path,
    *,
    scale: Scale,
    seeds: Sequence[int] | None = None,
    arms: Sequence[str] = (),
    jobs: int = 0,
    device: str = "cpu",
    minutes: float = 0.0,
    report: Listener = lambda *_: None,
) -> bool:
    """Run the arms that have no record yet, and write each record as soon as its run has ended.

    Args:
        entries: entries to run.
        out: folder of the records; intermediate files are below its folder ``runs``.
        scale: size of the runs.
        seeds: seeds; None: 0, 1, ... as many as the entry says.
        arms: names of arms, or parts of names; all arms without any.
        jobs: processes; 0: one for each core.
        device: where federations train, ``cpu`` or ``cuda``.
        minutes: time after which runs are stopped, to be resumed by the next call; 0: none.
        report: function that is called with progress.

    Returns:
        True if every run has ended, False if the time was over before.

    Raises:
        ConfigError: no arm matches, or a run cannot be made (such as for lack of its data).
    """
    deadline = time.monotonic() + 60 * minutes if minutes else None
    every = (
        Task(entry=entry.runs, arm=each.name, scale=scale, seed=seed, device=device)
        for entry in entries
        for seed in (range(entry.seeds[scale]) if seeds is None else seeds)
        for each in _selected(entry.arms(scale), arms)
    )
    wanted = list(dict.fromkeys(every))
    if not wanted and any(entry.arms(scale) for entry in entries):
        names = "; ".join(each.name for entry in entries for each in entry.arms(scale))
        text = f"expected names of arms, found {'; '.join(arms)}; there are: {names}"
        raise ConfigError(text, arms=tuple(arms))
    ended = {(r.entry, r.scale, r.arm, r.seed) for entry in entries for r in read_records(entry, out)}
    waiting = [task for task in wanted if (task.entry, scale, task.arm, task.seed) not in ended]
    done, failures = 0, []
    for task, found in _run(waiting, out, jobs or os.cpu_count() or 1, deadline):
        if isinstance(found, Record):
            done += 1
            add_records([found], ENTRIES[task.entry], out)
            shutil.rmtree(task.folder(out), ignore_errors=True)
        elif not isinstance(found, str):
            failures.append(f"{task.label}: {found}")
        report(task, len(waiting), found if isinstance(found, Record) else str(found))
    if failures:
        raise ConfigError(f"{len(failures)} of {len(waiting)} runs failed; the first one: {failures[0]}")
    return done == len(waiting)


def fetch_data(arms: Iterable[Arm]) -> list[str]:
    """Download the data of federations that no folder has, and return the names of all.

    Raises:
        ConfigError: some data cannot be downloaded; the others are.
    """
    from edgefl.api.federation import load_federation
    from edgefl.setup.data import open_data

    names, missing = [], []
    for settings in {a.settings["data.name"]: a.settings for a in arms if isinstance(a, Federated)}.values():
        try:
            names.append(open_data(load_federation(None, {**settings, "data.download": True})).name)
        except EdgeflError as error:
            missing.append(_remedy(error))
    if missing:
        raise ConfigError("; ".join(missing))
    return names


def _selected(arms: Sequence[Arm], names: Sequence[str]) -> Sequence[Arm]:
    exact = {arm.name for arm in arms} & set(names)
    parts = [name for name in names if name not in exact]
    return [arm for arm in arms if not names or arm.name in exact or any(part in arm.name for part in parts)]


def run_arm(task: Task, arm: Arm, folder: Path, progress: Callable[[str], None] = lambda _: None) -> Record:
    """Run an arm in this process, or resume what ``folder`` holds of it, and return its record.

    Raises:
        ConfigError: the arm cannot be run.
    """
    import torch

    torch.set_num_threads(1)  # runs are side by side, and equal threads give equal bits
    folder.mkdir(parents=True, exist_ok=True)
    started, began = datetime.now(UTC), _cpu_seconds()
    try:
        if isinstance(arm, Federated):
            found, data, before = _simulate(arm, task, folder, progress)
        else:
            found, data, before = arm.compute(ArmRun(task.seed, task.scale, progress)), "", 0.0
    except DivergedError:
        found, data, before = Measurements({DIVERGED: 1.0}), "", 0.0
    except EdgeflError as error:
        raise ConfigError(_remedy(error), arm=arm.name) from error
    return Record(
        **msgspec.structs.asdict(task),
        settings=settings_of(arm),
        figures={name: float(f"{x:.7g}") for name, x in found.figures.items() if math.isfinite(x)},
        lines={name: _thinned(line) for name, line in found.lines.items()},
        data=data,
        started=started.isoformat(timespec="seconds"),
        cpu_seconds=round(_cpu_seconds() - began + before, 1),
        processor=processor(),
        version=version(),
    )


def _remedy(error: EdgeflError) -> str:
    """Return an error's message. The library's remedy for missing data are settings, which an entry does not leave open."""
    if "searched" not in error.details:
        return error.message
    return (
        "{dataset} was not found in {searched}; put its files there, or name their folder with EDGEFL_DATA "
        "(docs/models/data.md lists the files); `python -m reproduce data` downloads all but CIFAR-10 as JPEG"
    ).format(**error.details)


def _simulate(
    arm: Federated, task: Task, folder: Path, progress: Callable[[str], None]
) -> tuple[Measurements, str, float]:
    """Return the measurements, the data's name, and the processor time of rounds that an earlier process ran."""
    from edgefl.api.federation import load_federation
    from edgefl.api.simulate import prepare_simulation
    from edgefl.simulator.results import RoundRow

    own = {"federation.seed": task.seed, **({"simulation.device": "cuda"} if task.device == "cuda" else {})}
    federation = load_federation(None, {**arm.settings, **own})
    spent, began, before = folder / "cpu_seconds", _cpu_seconds(), 0.0
    try:
        prepared = prepare_simulation(federation, folder / "simulation", resume=True)
        before = float(spent.read_text()) if spent.exists() else 0.0
    except ConfigError:  # nothing to resume, or begun with other settings or other code
        prepared = prepare_simulation(federation, folder / "simulation", fresh=True)

    def watch(row: RoundRow) -> None:
        spent.write_text(str(before + _cpu_seconds() - began))
        progress(f"round {row.round} of {federation.federation.rounds}")

    ended = prepared.run(watch)
    return arm.measure(ended), prepared.dataset.name, before


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _run(
    waiting: Sequence[Task], out: Path, jobs: int, deadline: float | None
) -> Iterator[tuple[Task, Record | str | BaseException]]:
    """Yield progress, records and failures of ``waiting`` until all have ended, or until ``deadline``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reproduce.runs", "torch"])
    messages: multiprocessing.Queue[tuple[Task, str]] = context.Queue()
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(messages,))
    with pool:
        running = {pool.submit(_work, task, out): task for task in waiting}
        try:
            while running and (deadline is None or time.monotonic() < deadline):
                done, _ = wait(running, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                while not messages.empty():
                    yield messages.get()
                for future in done:
                    yield running.pop(future), future.exception() or future.result()
        finally:
            if running:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()


_messages: multiprocessing.Queue[tuple[Task, str]] | None = None


def _begin(messages: multiprocessing.Queue[tuple[Task, str]]) -> None:
    global _messages  # noqa: PLW0603 - a process's own end of the queue
    _messages = messages
    # A run ends with the command, also after SIGKILL: the next command resumes it, and two must not write one folder.
    threading.Thread(target=_end_with_command, daemon=True).start()


def _end_with_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    command.join()
    os._exit(1)


def _work(task: Task, out: Path) -> Record:
    """Run a task in a process of the pool. Arms are found by name, since functions are not pickled."""
    messages = _messages
    assert messages is not None
    arm = next(arm for arm in ENTRIES[task.entry].arms(task.scale) if arm.name == task.arm)
    return run_arm(task, arm, task.folder(out), lambda text: messages.put((task, text)))


def _thinned(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most some hundred finite points, the last among them."""
    step = max(1, -(-len(line) // _POINTS))
    points = (point for point in reversed(line[::-1][::step]) if math.isfinite(point[1]))
    return [(float(f"{x:.6g}"), float(f"{y:.5g}")) for x, y in points]

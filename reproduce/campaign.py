"""Runs of a campaign, in processes side by side, and the pages they leave."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from edgefl.errors import ConfigError
from edgefl.system.files import write_text
from reproduce import embracingfl, fafed, fedbat, fiarse, per_fedavg
from reproduce.catalog import expand
from reproduce.entry import Arm, Entry, Scale, checked_scale
from reproduce.page import PAGE_NAME, overview, summaries, write_entry
from reproduce.record import Record, Summary, made_of, read_record, run_arm, summed_up


def reproduce(
    names: str | Sequence[str],
    out: str | Path = "reproductions",
    *,
    scale: Scale = "smoke",
    seeds: int = 0,
    jobs: int = 0,
    fresh: bool = False,
    tell: Callable[[TaskEvent], None] = lambda _: None,
) -> list[Summary]:
    """Run results of papers again, and write each one's table, pictures and claims below ``out``, and a page over all that
    is there.

    Args:
        names: entries such as ``fafed/counterexample``, or a paper's name for all of its own.
        out: folder for pages; ``runs`` below it has every run, of which those that are finished are not run again.
        scale: ``smoke``, ``cpu`` or ``paper``.
        seeds: how many; 0: as many as the entry says.
        jobs: runs at a time; 0: one for each processor.
        fresh: run again what has a result.
        tell: called with the progress of each run.

    Raises:
        ConfigError: for a wrong name or scale, and where a run cannot be made, for example for lack of its data.
    """
    checked_scale(scale)
    place = Path(out)
    entries = selected([names] if isinstance(names, str) else names)
    wanted = {entry.name: tasks(entry, scale, seeds or entry.seeds[scale], place) for entry in entries}
    records = campaign([each for own in wanted.values() for each in own], jobs=jobs, fresh=fresh, tell=tell)
    found = []
    for entry in entries:
        own = [record for record in records if record.entry == entry.name]
        summary = summed_up(entry, scale, own)
        write_entry(entry, summary, own, place)
        found.append(summary)
    write_text(place / PAGE_NAME, overview(summaries(place)))
    return found


RUNS = "runs"
_TELL_S = 0.5


@dataclass(frozen=True)
class Task:
    """A run that is wanted."""

    entry: str
    arm: str
    scale: Scale
    seed: int
    folder: Path


@dataclass(frozen=True)
class TaskEvent:
    """How far a campaign of ``of`` runs is: a run's progress, or its record once it is over; ``kept``: it was there."""

    task: Task
    of: int
    text: str = ""
    record: Record | None = None
    kept: bool = False


def tasks(entry: Entry, scale: Scale, seeds: int, out: Path) -> list[tuple[Task, Arm]]:
    """Every run of ``entry``, all arms of the first seed first. ConfigError where two arms have one name."""
    arms = entry.arms(scale)
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names):
        raise ConfigError(f"{entry.name} has two arms of one name among {', '.join(names)}", entry=entry.name)
    place = out / RUNS / scale / entry.name
    return [
        (Task(entry.name, arm.name, scale, seed, place / _plain(arm.name) / f"seed-{seed}"), arm)
        for seed in range(seeds)
        for arm in arms
    ]


def campaign(
    wanted: Sequence[tuple[Task, Arm]],
    *,
    jobs: int = 0,
    fresh: bool = False,
    tell: Callable[[TaskEvent], None] = lambda _: None,
) -> list[Record]:
    """The records of all runs, in their order; ``jobs`` at a time (0: one for each processor). ``fresh`` discards what
    earlier ones left. The first error ends it, and what is under way; it continues where it stopped."""
    records: dict[Task, Record] = {}
    waiting: list[Task] = []
    for task, arm in wanted:
        if fresh:
            shutil.rmtree(task.folder, ignore_errors=True)
        known = read_record(task.folder)
        if known is not None and known.settings == made_of(arm, task.seed):
            records[task] = known
            tell(TaskEvent(task, len(wanted), record=known, kept=True))
        else:
            waiting.append(task)

    def heard(task: Task, text: str) -> None:
        tell(TaskEvent(task, len(wanted), text))

    for task, record in _run(waiting, jobs or os.cpu_count() or 1, heard):
        records[task] = record
        tell(TaskEvent(task, len(wanted), record=record))
    return [records[task] for task, _ in wanted]


def _run(
    waiting: Sequence[Task], jobs: int, heard: Callable[[Task, str], None]
) -> Iterator[tuple[Task, Record]]:
    if not waiting:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["reproduce.record"])
    lines: multiprocessing.Queue[tuple[int, str]] = context.Queue()
    pool = ProcessPoolExecutor(
        min(jobs, len(waiting)), mp_context=context, initializer=_begin, initargs=(lines,)
    )
    with pool:
        running: dict[Future[Record], Task] = {
            pool.submit(_work, number, task): task for number, task in enumerate(waiting)
        }
        try:
            while running:
                done, _ = wait(running, timeout=_TELL_S, return_when=FIRST_COMPLETED)
                while not lines.empty():
                    number, text = lines.get()
                    heard(waiting[number], text)
                for future in done:
                    yield running.pop(future), future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


_lines: multiprocessing.Queue[tuple[int, str]] | None = None


def _begin(lines: multiprocessing.Queue[tuple[int, str]]) -> None:
    global _lines  # noqa: PLW0603 - a process's own end of the line
    _lines = lines


def _work(number: int, task: Task) -> Record:
    """In a process of the pool, which finds the arm by its name: what an arm does is code, and does not travel."""
    found = {arm.name: arm for arm in ENTRIES[task.entry].arms(task.scale)}
    lines = _lines

    def progress(text: str) -> None:
        if lines is not None:
            lines.put((number, text))

    return run_arm(task.entry, found[task.arm], task.scale, task.seed, task.folder, progress)


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-._=" else "-" for letter in name)


ENTRIES: Mapping[str, Entry] = {
    entry.name: entry for paper in (embracingfl, fedbat, per_fedavg, fiarse, fafed) for entry in paper.ENTRIES
}


def selected(names: Sequence[str]) -> list[Entry]:
    """Return the entries of ``names``. ConfigError for a wrong name (:func:`reproduce.catalog.expand`)."""
    return [ENTRIES[name] for name in expand(names)]

"""Results of the papers, run again: :func:`reproduce`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgefl.papers.campaign import ENTRIES, TaskEvent, campaign, selected, tasks
from edgefl.papers.entry import SCALES, Entry, Scale
from edgefl.papers.page import PAGE_NAME, overview, summaries, write_entry
from edgefl.papers.record import Summary, summed_up
from edgefl.system.files import write_text
from edgefl.wire.errors import ConfigError


def reproductions() -> Sequence[Entry]:
    """The results of papers that can be run again."""
    return tuple(ENTRIES.values())


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
        fresh: run again what is there.
        tell: is told how far each run is.

    Raises:
        ConfigError: for a wrong name or scale, and where a run cannot be made, for example for lack of its data.
    """
    if scale not in SCALES:
        raise ConfigError(f"no scale {scale!r}; there are: {', '.join(SCALES)}", scale=scale)
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

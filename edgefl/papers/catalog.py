"""The entries by name, paper by paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.papers import embracingfl, fafed, fedbat, fiarse, per_fedavg
from edgefl.papers.entry import Entry
from edgefl.wire.errors import ConfigError

ENTRIES: Mapping[str, Entry] = {
    entry.name: entry for paper in (embracingfl, fedbat, per_fedavg, fiarse, fafed) for entry in paper.ENTRIES
}


def named(name: str) -> Entry:
    """ConfigError, with what exists, for a wrong name."""
    if name not in ENTRIES:
        raise ConfigError(
            f"no reproduction {name!r}; there are: {', '.join(ENTRIES)}, or a paper for all of its own "
            f"({', '.join(papers())})",
            name=name,
        )
    return ENTRIES[name]


def papers() -> Sequence[str]:
    """What stands before the slash."""
    return tuple(dict.fromkeys(name.partition("/")[0] for name in ENTRIES))


def selected(names: Sequence[str]) -> list[Entry]:
    """The entries of these names; a paper's name stands for all of its own. ConfigError for a wrong name."""
    chosen: dict[str, Entry] = {}
    for name in names:
        own = [entry for each, entry in ENTRIES.items() if each.startswith(f"{name.rstrip('/')}/")]
        for entry in own or [named(name)]:
            chosen[entry.name] = entry
    return list(chosen.values())

"""All entries, in the order of the papers' tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.errors import ConfigError
from edgefl.wire.text import suggest
from reproduce import embracingfl, fafed, fedbat, fiarse, per_fedavg
from reproduce.entry import Entry

ENTRIES: Mapping[str, Entry] = {
    entry.name: entry for paper in (embracingfl, fedbat, per_fedavg, fiarse, fafed) for entry in paper.ENTRIES
}


def selected(names: Sequence[str]) -> list[Entry]:
    """Return the entries of ``names``, each once; a paper's name selects all its entries, ``all`` every one.

    Raises:
        ConfigError: a name is neither an entry nor a paper.
    """
    chosen: dict[str, Entry] = {}
    for name in names:
        prefix = f"{name.rstrip('/')}/"
        found = {key: ENTRIES[key] for key in ENTRIES if name in (key, "all") or key.startswith(prefix)}
        if not found:
            known = suggest(name, [*dict.fromkeys(key.partition("/")[0] for key in ENTRIES), *ENTRIES])
            text = f"expected a paper or an entry, found {name!r}; `python -m reproduce` lists them{known}"
            raise ConfigError(text, name=name)
        chosen |= found
    return list(chosen.values())

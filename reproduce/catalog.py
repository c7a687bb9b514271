"""Names of all entries. Imports no torch, so that the command refuses a wrong name at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgefl.errors import ConfigError
from edgefl.wire.text import suggest

ENTRIES_BY_PAPER: Mapping[str, Sequence[str]] = {
    "embracingfl": ("heterogeneity", "scaling", "bn", "accounting", "svcca", "theory", "text", "device"),
    "fedbat": ("main", "ablation", "one_bit", "theory"),
    "per_fedavg": ("table1", "local_steps", "regime", "theory", "heterogeneity"),
    "fiarse": ("sizes", "cifar10", "exploration", "ablation", "participation", "text"),
    "fafed": ("counterexample", "table2", "preconditioner", "speedup", "text"),
}
NAMES = tuple(f"{paper}/{entry}" for paper, entries in ENTRIES_BY_PAPER.items() for entry in entries)


def expand(names: Sequence[str]) -> list[str]:
    """Return the entries of ``names``, each once. The name of a paper selects all its entries.

    Raises:
        ConfigError: if there is neither an entry nor a paper of a name.
    """
    chosen: dict[str, None] = {}
    for name in names:
        found = [entry for entry in NAMES if name == entry or entry.startswith(f"{name.rstrip('/')}/")]
        if not found:
            raise ConfigError(
                f"no reproduction {name!r}; there are: {', '.join(NAMES)}, or a paper for all of its own "
                f"({', '.join(ENTRIES_BY_PAPER)}){suggest(name, [*ENTRIES_BY_PAPER, *NAMES])}",
                name=name,
            )
        chosen.update(dict.fromkeys(found))
    return list(chosen)

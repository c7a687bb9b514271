"""All cases, in the order in which they are told."""

from __future__ import annotations

from fnmatch import fnmatchcase

from edgefl.errors import ConfigError
from edgefl_conformance.case import Case, Group
from edgefl_conformance.cases.algorithms import ALGORITHMS
from edgefl_conformance.cases.blobs import BLOBS
from edgefl_conformance.cases.declines import DECLINES
from edgefl_conformance.cases.elsewhere import ELSEWHERE
from edgefl_conformance.cases.interruptions import CUTS, INTERRUPTIONS
from edgefl_conformance.cases.joining import JOINING
from edgefl_conformance.cases.order import ORDER
from edgefl_conformance.cases.profiles import PROFILES
from edgefl_conformance.cases.rounds import ROUNDS
from edgefl_conformance.cases.sending import SENDING
from edgefl_conformance.cases.trust import TRUST

GROUPS: tuple[Group, ...] = (
    JOINING,
    ROUNDS,
    ALGORITHMS,
    BLOBS,
    ELSEWHERE,
    SENDING,
    INTERRUPTIONS,
    CUTS,
    TRUST,
    ORDER,
    DECLINES,
    PROFILES,
)
CASES: tuple[Case, ...] = tuple(case for group in GROUPS for case in group.cases)


def chosen(names: tuple[str, ...] = ()) -> tuple[Case, ...]:
    """Those that have one of these names, or are of a group of that name; patterns with * are fine. All if none is given.

    ConfigError for a name that no case has."""
    for name in names:
        if not any(_matches(case, name) for case in CASES):
            groups = ", ".join(group.name for group in GROUPS)
            raise ConfigError(
                f"no case is called {name!r}: `edgefl-conformance cases` lists them; groups are {groups}",
                name=name,
            )
    return tuple(case for case in CASES if not names or any(_matches(case, name) for name in names))


def _matches(case: Case, name: str) -> bool:
    return fnmatchcase(case.name, name) or case.group == name

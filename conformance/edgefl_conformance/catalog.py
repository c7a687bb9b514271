"""All cases, in the order of their play."""

from __future__ import annotations

from fnmatch import fnmatchcase

from edgefl.errors import ConfigError
from edgefl_conformance.case import Case, CaseGroup
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

GROUPS: tuple[CaseGroup, ...] = (
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
    """Return the cases with one of these names or groups; all without names.

    Args:
        names: names of cases, patterns with *, or names of groups.

    Raises:
        ConfigError: a name matches no case.
    """
    for name in names:
        if not any(_matches(case, name) for case in CASES):
            groups = ", ".join(group.name for group in GROUPS)
            raise ConfigError(
                f"no case {name!r}; `edgefl-conformance cases` lists them, groups are {groups}",
                name=name,
            )
    return tuple(case for case in CASES if not names or any(_matches(case, name) for name in names))


def _matches(case: Case, name: str) -> bool:
    return fnmatchcase(case.name, name) or case.group == name

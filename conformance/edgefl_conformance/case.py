"""A case: a name, one sentence about what it checks, and a function that plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl_conformance.play.stage import Stage

Script = Callable[[Stage], None]


@dataclass(frozen=True)
class Case:
    """``group``: cases of a group that are not ``alone`` share an agent, one after the other. ``alone``: it has an agent of
    its own. ``optional``: an agent may be right without it. ``engines``: for which it means something."""

    name: str
    group: str
    says: str
    script: Script
    alone: bool = False
    optional: bool = False
    engines: tuple[str, ...] = ("onnx", "executorch")


@dataclass(frozen=True)
class Group:
    """Cases in the order in which they are played: ``@group.case(...)`` above each script."""

    name: str
    cases: list[Case] = field(default_factory=list)

    def case(
        self,
        says: str,
        *,
        alone: bool = False,
        optional: bool = False,
        engines: tuple[str, ...] = ("onnx", "executorch"),
    ) -> Callable[[Script], Script]:
        """The script below is a case, named as its function with dashes."""

        def registered(script: Script) -> Script:
            name = script.__name__.replace("_", "-")
            self.cases.append(Case(name, self.name, says, script, alone, optional, engines))
            return script

        return registered

"""A case: a name, one sentence about what it checks, and a function that plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgefl_conformance.play.harness import RoundHarness

Script = Callable[[RoundHarness], None]


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        group: cases of a group share an agent, one after the other.
        says: the checked behavior in one sentence.
        script: plays the case.
        alone: the case has an agent of its own.
        optional: a correct agent may fail it.
        engines: engines to which it applies.
    """

    name: str
    group: str
    says: str
    script: Script
    alone: bool = False
    optional: bool = False
    engines: tuple[str, ...] = ("onnx", "executorch")


@dataclass(frozen=True)
class CaseGroup:
    """Cases in the order of their play, registered by ``@group.case(...)``."""

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
        """Register the decorated script as a case, named like its function with dashes."""

        def registered(script: Script) -> Script:
            name = script.__name__.replace("_", "-")
            self.cases.append(Case(name, self.name, says, script, alone, optional, engines))
            return script

        return registered

"""Local algorithms as pure functions of named tensors.

``programs.build("sgd", objective, batch=32, steps=10)`` gives a :class:`~edgefl.contract.program.Program`;
``build("package.module:factory", ...)`` loads a method from a package of your own, ``"file.py:factory"`` from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgefl.contract.program import Program
    from edgefl.objective.objective import Objective


def build(name: str, objective: Objective, **options: object) -> Program:
    """The program ``name`` for ``objective``; ConfigError, with what exists, for a wrong name or option."""
    from edgefl.programs import (
        catalog,
    )  # here, because the models need this package's contract and no program

    return catalog.build(name, objective, **options)

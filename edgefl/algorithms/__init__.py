"""Local algorithms as pure functions of named tensors.

``algorithms.build("sgd", objective, batch=32, steps=10)`` gives a :class:`~edgefl.contract.algorithm.Algorithm`;
``build("package.module:factory", ...)`` loads a method from a package of your own, ``"file.py:factory"`` from a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgefl.contract.algorithm import Algorithm
    from edgefl.objective.objective import Objective


def build(name: str, objective: Objective, **options: object) -> Algorithm:
    """The algorithm ``name`` for ``objective``; ConfigError, with what exists, for a wrong name or option."""
    from edgefl.algorithms import (
        catalog,
    )  # here, because the models need this package's contract and no algorithm

    return catalog.build(name, objective, **options)

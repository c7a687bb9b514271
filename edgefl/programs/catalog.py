"""The programs by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

from edgefl.options import check_options
from edgefl.programs.binary import binary
from edgefl.programs.contract import Program
from edgefl.programs.fedbat import fedbat
from edgefl.programs.multi_exit import multi_exit
from edgefl.programs.objective import Objective
from edgefl.programs.sgd import sgd
from edgefl.programs.swat import swat
from edgefl.programs.tcbgd import tcbgd
from edgefl.wire.errors import ConfigError

PROGRAMS: Mapping[str, Callable[..., Program]] = {
    "sgd": sgd,
    "tcbgd": tcbgd,
    "multi_exit": multi_exit,
    "swat": swat,
    "binary": binary,
    "fedbat": fedbat,
}


def build(name: str, objective: Objective, **options: object) -> Program:
    """The program ``name`` for ``objective``. Raises ConfigError, with what exists, for a wrong name or option."""
    factory = _imported(name) if ":" in name else PROGRAMS.get(name)
    if factory is None:
        known = ", ".join(sorted(PROGRAMS))
        raise ConfigError(
            f"no program {name!r}; there are: {known}, or 'package.module:factory'", name=name, known=known
        )
    check_options(f"program {name!r}", factory, options)
    return factory(objective, **options)


def _imported(path: str) -> Callable[..., Program]:
    module, _, attribute = path.partition(":")
    try:
        factory: Callable[..., Program] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load program {path!r}: {error}", name=path) from error
    return factory

"""The programs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgefl.contract.options import check_options
from edgefl.contract.program import Program
from edgefl.models.user_code import blamed
from edgefl.models.user_factory import factory_of, importing_for
from edgefl.objective.objective import Objective
from edgefl.optimizers import OPTIMIZERS
from edgefl.programs.adaptive.fafed import fafed
from edgefl.programs.adaptive.local_amsgrad import local_amsgrad
from edgefl.programs.adaptive.naive_adaptive import naive_adaptive
from edgefl.programs.adaptive.stem import stem
from edgefl.programs.baselines.adamw import adamw
from edgefl.programs.baselines.fedavg import fedavg, fedavg_matched, fedavg_update
from edgefl.programs.baselines.fedprox import fedprox
from edgefl.programs.baselines.local_only import local
from edgefl.programs.baselines.mime import mimeadam, mimelite
from edgefl.programs.baselines.scaffold import scaffold
from edgefl.programs.baselines.sgd import sgd
from edgefl.programs.personal.adapted import adapted
from edgefl.programs.personal.per_fedavg import per_fedavg
from edgefl.programs.quantized.binary import binary
from edgefl.programs.quantized.fedbat import fedbat
from edgefl.programs.quantized.swat import swat
from edgefl.programs.submodels.multi_exit import multi_exit
from edgefl.programs.submodels.tcbgd import tcbgd
from edgefl.wire.errors import ConfigError

PROGRAMS: Mapping[str, Callable[..., Program]] = {
    "sgd": sgd,
    "fedavg": fedavg,
    "fedavg_update": fedavg_update,
    "fedavg_matched": fedavg_matched,
    "per_fedavg": per_fedavg,
    "local": local,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "fafed": fafed,
    "stem": stem,
    "naive_adaptive": naive_adaptive,
    "local_amsgrad": local_amsgrad,
    "mimeadam": mimeadam,
    "mimelite": mimelite,
    "adamw": adamw,
    "tcbgd": tcbgd,
    "multi_exit": multi_exit,
    "swat": swat,
    "binary": binary,
    "fedbat": fedbat,
}


PERSONAL = "personal"
"""The option that every program has: the step size of a graph that adapts the model to one user."""


def build(name: str, objective: Objective, **options: object) -> Program:
    """The program ``name`` for ``objective``. Raises ConfigError, with what exists, for a wrong name or option.

    ``personal``, which no factory needs to know, adds the graph of :func:`edgefl.programs.personal.adapted.adapted`
    to any program that has none. It is left out otherwise, since it costs each bundle a graph and each export the
    time to make it.
    """
    factory = factory_of(name, "program") if ":" in name else PROGRAMS.get(name)
    if factory is None:
        known = ", ".join(sorted(PROGRAMS))
        if name in OPTIMIZERS:
            raise ConfigError(
                f"{name!r} is an optimizer of the server and no program: set program fedavg and optimizer {name}, in a "
                f'federation file [optimizer] name = "{name}"',
                name=name,
            )
        raise ConfigError(
            f"no program {name!r}; there are: {known}, 'package.module:factory' or 'path/to/file.py:factory'",
            name=name,
            known=known,
        )
    personal = options.pop(PERSONAL, None)
    check_options(f"program {name!r}", factory, options)
    if ":" in name:
        with blamed(f"the factory {name!r} of a program failed"), importing_for(name):
            program = factory(objective, **options)
    else:
        program = factory(objective, **options)
    if personal is None:
        return program
    if isinstance(personal, bool) or not isinstance(personal, int | float):
        raise ConfigError(
            f"program {name!r}: personal is {personal!r}; set it to the step size of the graph that adapts the model to one "
            "user, such as 0.01",
            option=PERSONAL,
        )
    return adapted(program, objective, alpha=personal)

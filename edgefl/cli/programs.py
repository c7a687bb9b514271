"""``edgefl ls programs`` and ``edgefl ls optimizers``: what each is, and what it asks of devices and of the server."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl.bench.programs import ProgramRow

_ROLE = re.compile(r":\w+:`(?:[\w.]*\.)?(\w+)`")
"""A reference such as :func:`edgefl.programs.sgd.sgd`, of which people read the last name."""

CAPTION = (
    "gradients: of one local step, and Hessian-vector products; full: a pass over all local samples. up, down, kept: floats "
    "for each parameter of the model, per device and round; kept is what a device stores until the next. everyone: every "
    "device has to take part. Any program also takes personal=ALPHA, and one that the server averages an optimizer."
)


def program_rows() -> list[dict[str, Any]]:
    """One row per program, its cost measured on a model of a few parameters."""
    from edgefl import programs
    from edgefl.programs.catalog import PROGRAMS

    rows = []
    for name, factory in PROGRAMS.items():
        objective, measured = _measured(name)
        made = programs.build(name, objective)
        turn = [row for row in measured if row.exchange != "opening"]
        opening = [row for row in measured if row.exchange == "opening"]
        rows.append(
            {
                "name": name,
                "what": summary(factory),
                "server": made.server.name,
                "memory": list(made.memory),
                "exchanges": len(turn),
                "opening": len(opening),
                "gradients": turn[-1].gradients_per_step,
                "products": turn[-1].products_per_step,
                "full": any(phase.over_data for each in made.exchanges for phase in each.phases),
                "up": sum(row.up for row in turn),
                "down": sum(row.down for row in turn),
                "kept": turn[-1].kept,
                "everyone": made.whole,
                "options": options_of(factory, 1),
            }
        )
    return rows


def for_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the few words that belong together in one column."""
    told = []
    for row in rows:
        gradients = " + ".join(
            [
                str(row["gradients"]),
                *([f"{row['products']} product"] if row["products"] else []),
                *(["full"] if row["full"] else []),
            ]
        )
        exchanges = f"{row['exchanges']}{' + an opening' if row['opening'] else ''}"
        joined = {"server": ", ".join((row["server"], *row["memory"])), "gradients": gradients}
        left_out = {"memory", "products", "full", "opening"}
        kept = {key: value for key, value in row.items() if key not in left_out}
        told.append(kept | joined | {"exchanges": exchanges})
    return told


def optimizer_rows() -> list[dict[str, Any]]:
    """One row per optimizer of the server."""
    from edgefl.optimizers import OPTIMIZERS

    return [
        {
            "name": name,
            "what": summary(factory),
            "memory": list(factory().memory),
            "options": options_of(factory, 0),
        }
        for name, factory in OPTIMIZERS.items()
    ]


def summary(factory: Callable[..., Any]) -> str:
    """What a factory is in a line: the first of its own description, or of its module's if that begins with formulas."""
    own = (inspect.getdoc(factory) or "").partition("\n")[0]
    module = (inspect.getdoc(inspect.getmodule(factory)) or "").partition("\n")[0]
    return _ROLE.sub(r"\1", own if own.endswith(".") else module).replace("``", "")


def options_of(factory: Callable[..., Any], upon: int) -> dict[str, Any]:
    """Name and default of every option."""
    parameters = list(inspect.signature(factory).parameters.values())[upon:]
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _measured(name: str) -> tuple[Any, list[ProgramRow]]:
    """(the objective, a row for each exchange) on a small model: dense layers, with exits where the program needs them."""
    from edgefl.bench.programs import Settings, measure
    from edgefl.models import zoo
    from edgefl.models.exits import with_exits
    from edgefl.programs.objective import Objective
    from edgefl.submodels.output_side import OutputSide
    from edgefl.wire.errors import ModelError

    settings = Settings(batch=2, steps=2, samples=4, repeat=0)
    plain = zoo.build("mlp", size=8, hidden=[64, 32])
    for spec in (plain, with_exits(plain)):
        try:
            return Objective.of(OutputSide(spec, 0)), measure(spec, name, settings)
        except ModelError:
            continue
    raise AssertionError(f"no small model for {name}")

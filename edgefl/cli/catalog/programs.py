"""``edgefl ls programs`` and ``edgefl ls optimizers``: what each is, and what it asks of devices and of the server."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgefl.bench.programs.rows import ProgramRow
    from edgefl.contract.program import Program

_ROLE = re.compile(r":\w+:`(?:[\w.]*\.)?(\w+)`")
"""A reference such as :func:`edgefl.programs.baselines.sgd.sgd`, of which people read the last name."""

_MARKS = {"scalars": "scalar of the task", "server_options": "of the server"}

CAPTION = (
    "exchanges: of a round, and those that come once, before all. gradients: of a local step; full: a pass over all local "
    "samples. up/down/kept: floats for each parameter, per device and round; kept is what a device stores until the next. "
    "all: every device has to take part. Options and more: edgefl ls programs NAME. Each also takes personal=ALPHA."
)


def program_rows() -> list[dict[str, Any]]:
    """One row per program, its cost measured on a model of a few parameters."""
    from edgefl import programs
    from edgefl.programs.catalog import PROGRAMS
    from edgefl.setup.versions import why_not

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
                "server_state": list(made.server_state),
                "exchanges": len(turn),
                "opening": len(opening),
                "gradients": turn[-1].gradients_per_step,
                "products": turn[-1].products_per_step,
                "full": any(phase.over_data for each in made.exchanges for phase in each.phases),
                "up": sum(row.up for row in turn),
                "down": sum(row.down for row in turn),
                "kept": turn[-1].kept,
                "everyone": made.whole,
                "not_buffered": why_not(made),
                "options": options_of(factory, 1),
                "scalars": sorted(scalars_of(made) & options_of(factory, 1).keys()),
                "server_options": sorted(server_options_of(made) & options_of(factory, 1).keys()),
            }
        )
    return rows


def scalars_of(program: Program) -> set[str]:
    """The options that a round announces, by their own names or as what its schedule makes of them."""
    return set().union(*(exchange.hyper.keys() | exchange.announced for exchange in program.exchanges))


def server_options_of(program: Program) -> set[str]:
    """The options that the server alone reads, when it makes the new model of the averages."""
    return set().union(*(exchange.server.options for exchange in program.exchanges))


def for_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same in columns that fit a terminal; the options are left to :func:`one`."""
    return [
        {
            "name": row["name"],
            "what": row["what"].partition(":")[0].removesuffix("."),
            "exchanges": f"{row['exchanges']}{' + 1 once' if row['opening'] else ''}",
            "gradients": " + ".join([str(row["gradients"]), *(["full"] if row["full"] else [])]),
            "up/down/kept": "/".join(f"{row[key]:.3g}" for key in ("up", "down", "kept")),
            "all": row["everyone"],
        }
        for row in rows
    ]


def one(rows: list[dict[str, Any]], name: str, what: str) -> list[dict[str, Any]]:
    """Everything about one of ``rows``, a line each; ConfigError if there is none of that name."""
    from edgefl.wire.errors import ConfigError

    known = {str(row["name"]): row for row in rows if "name" in row}
    if name not in known:
        raise ConfigError(f"`edgefl ls {what}` has no {name!r}; there are: {', '.join(known)}", name=name)
    row = {key: value for key, value in known[name].items() if key not in ("options", *_MARKS)}
    options = known[name].get("options") or {}
    lines = [{"key": key, "value": value} for key, value in row.items()]
    if isinstance(options, dict):
        return lines + [
            {"key": f"option {key}{_mark(key, known[name])}", "value": value}
            for key, value in options.items()
        ]
    return [*lines, {"key": "options", "value": options}]


def _mark(option: str, row: dict[str, Any]) -> str:
    """Where a program's option acts; nothing for what has no graphs."""
    if "scalars" not in row:
        return ""
    return next((f", {text}" for key, text in _MARKS.items() if option in row[key]), ", compiled in")


def optimizer_rows() -> list[dict[str, Any]]:
    """One row per optimizer of the server."""
    from edgefl.optimizers import OPTIMIZERS

    return [
        {
            "name": name,
            "what": summary(factory),
            "server_state": list(factory().state),
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
    from edgefl.bench.programs.rows import ProgramSettings, measure
    from edgefl.models.exits import with_exits
    from edgefl.models.zoo.catalog import build_model
    from edgefl.objective.objective import Objective
    from edgefl.submodels.output_side.submodel import OutputSide
    from edgefl.wire.errors import ModelError

    settings = ProgramSettings(batch=2, steps=2, samples=4, repeat=0)
    plain = build_model("mlp", size=8, hidden=[64, 32])
    for spec in (plain, with_exits(plain)):
        try:
            return Objective.of(OutputSide(spec, 0)), measure(spec, name, settings)
        except ModelError:
            continue
    raise AssertionError(f"no small model for {name}")

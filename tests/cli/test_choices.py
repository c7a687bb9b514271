"""What a command may be told is written so that every release of typer which our extras pull in can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import typer

from edgefl.cli import app


def test_choices_are_enums_because_the_typer_that_flower_allows_knows_no_literal() -> None:
    commands = {command.__name__: get_type_hints(command) for command in _commands(app)}
    assert {"deploy", "train_step", "ls"} <= set(commands)
    literal = [
        f"{command} {name}"
        for command, hints in commands.items()
        for name, hint in hints.items()
        if _has(hint)
    ]
    assert not literal, "write StrEnum in place of Literal"


def _commands(group: typer.Typer) -> Iterator[Callable[..., Any]]:
    yield from (info.callback for info in group.registered_commands if info.callback)
    for below in group.registered_groups:
        if below.typer_instance:
            yield from _commands(below.typer_instance)


def _has(hint: object) -> bool:
    return get_origin(hint) is Literal or any(map(_has, get_args(hint)))

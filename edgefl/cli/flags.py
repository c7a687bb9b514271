"""Messages of the library in the words of the command line: an argument that stands in back quotes becomes its flag.

The library says "choose another `out`"; whoever typed ``edgefl run`` reads "choose another --out".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

Command = Any
"""One of typer's commands; the module of their type differs between releases."""
_ARGUMENT = re.compile(r"`([a-z][a-z_]*)`")


def in_flags(message: str, command: Command, arguments: Sequence[str]) -> str:
    """``message`` with the arguments that the command of this command line takes as flags; the others stay as they are."""
    flags = _flags(_called(command, arguments))
    return _ARGUMENT.sub(lambda match: flags.get(match[1], match[0]), message)


def _called(command: Command, arguments: Sequence[str]) -> Command:
    """The innermost command that the words of a command line name."""
    for word in arguments:
        children: dict[str, Command] = getattr(command, "commands", {})
        if word in children:
            command = children[word]
    return command


def _flags(command: Command) -> dict[str, str]:
    """Flags by the name of their parameter, and by their own name."""
    flags: dict[str, str] = {}
    for parameter in command.params:
        longest = max((name for name in parameter.opts if name.startswith("--")), key=len, default="")
        if longest:
            flags[longest[2:].replace("-", "_")] = longest
            flags[str(parameter.name)] = longest
    return flags

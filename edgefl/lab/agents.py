"""Agent programs of the devices of a run on one machine: Python's agent, and those of `agents/`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle, zip_longest
from pathlib import Path

from edgefl.config import Federation
from edgefl.errors import ConfigError
from edgefl.setup.tiers import own_tiers
from edgefl.system.processes import module_command
from edgefl.wire.text import suggest

ROOT = Path(__file__).resolve().parents[2]
PYTHON, CPP, WEB = "python", "cpp", "web"
CPP_VARIABLE, WEB_VARIABLE = "EDGEFL_AGENT_CPP", "EDGEFL_AGENT_WEB"
_CPP_PROGRAM = "edgefl-agent"
_MOST = 1000


def parse_agents(text: str) -> dict[str, int]:
    """Return the number of devices by kind from text such as ``python:2,cpp:2,web:2``; a kind alone counts once.

    Raises:
        ConfigError: for any other text.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        kind, colon, number = part.strip().partition(":")
        count = 1 if not colon else int(number) if number.isdecimal() and len(number) < 5 else 0
        if kind not in COMMANDS or not 1 <= count <= _MOST or kind in counts:
            raise ConfigError(
                f"agents are KIND:COUNT by commas, each kind once, like python:2,cpp:1,web:1, found {part.strip()!r}; kinds "
                f"are {', '.join(COMMANDS)}{suggest(kind, COMMANDS) if kind not in COMMANDS else ''}",
                agents=text,
            )
        counts[kind] = count
    return counts


def with_agents(federation: Federation, counts: Mapping[str, int]) -> Federation:
    """Return the federation with as many devices as agents in ``counts`` (by kind), distributed evenly over its tiers."""
    tiers = own_tiers(federation)
    total = sum(counts.values())
    share = {name: len(range(place, total, len(tiers))) for place, name in enumerate(tiers)}
    dealt = {name: table.model_copy(update={"count": share[name]}) for name, table in tiers.items()}
    return federation.model_copy(update={"tiers": dealt})


def deal_agents(devices: Sequence[str], counts: Mapping[str, int]) -> dict[str, str]:
    """Return the kind of agent for each device, by the device's name. Kinds alternate, so that a tier has several of
    them.

    Args:
        devices: names of the devices.
        counts: number of devices by kind; if it is empty, the result is {}.
    """
    turns = zip_longest(*([kind] * count for kind, count in counts.items()))
    kinds = [kind for kind in chain.from_iterable(turns) if kind]
    return dict(zip(devices, cycle(kinds), strict=False)) if kinds else {}


def command_of(kind: str) -> list[str]:
    """Return the command of an agent of this kind, without its options.

    Raises:
        ConfigError: if the agent, or a program that it needs, is not installed here.
    """
    return COMMANDS[kind]()


def _python() -> list[str]:
    return module_command("edgefl", "device")


def _cpp() -> list[str]:
    named = os.environ.get(CPP_VARIABLE, "")
    built = ROOT / "build" / "agents" / "cpp" / _CPP_PROGRAM
    found = shutil.which(named) if named else shutil.which(_CPP_PROGRAM) or shutil.which(str(built))
    if found is None:
        where = (
            f"{CPP_VARIABLE} names {named}, which" if named else f"{_CPP_PROGRAM} is not in PATH, and {built}"
        )
        raise ConfigError(
            f"the C++ agent is not built: {where} is no program. Run `make agents-cpp` in a checkout, or name the program "
            f"by {CPP_VARIABLE}",
            kind=CPP,
        )
    return [found]


def _web() -> list[str]:
    named = os.environ.get(WEB_VARIABLE, "")
    program = Path(named) if named else ROOT / "agents" / "web" / "bin" / "edgefl-web-device.mjs"
    needed = [program] if named else [program, ROOT / "agents" / "web" / "dist" / "worker.js"]
    missing = [path for path in needed if not path.is_file()]
    if missing:
        raise ConfigError(
            f"the browser agent is not built: there is no {missing[0]}. Run `make agents-web` in a checkout, or name its "
            f"program by {WEB_VARIABLE}",
            kind=WEB,
            missing=str(missing[0]),
        )
    node, browser = shutil.which("node"), find_chromium()
    if node is None or browser is None:
        raise ConfigError(
            f"a browser agent runs in Chromium, started by Node, and there is no {'node' if node is None else 'chromium'}: "
            "install it (Debian: apt-get install nodejs chromium)",
            kind=WEB,
            program="node" if node is None else "chromium",
        )
    return [node, str(program)]


def find_chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    names = "chromium", "chromium-browser", "google-chrome"
    return next((found for name in names if (found := shutil.which(name))), None)


COMMANDS: Mapping[str, Callable[[], list[str]]] = {PYTHON: _python, CPP: _cpp, WEB: _web}

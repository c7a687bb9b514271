"""Formats of graphs, and releases of the runtimes that load them. An engine reads one format and has its name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from edgefl.errors import ConfigError

FormatName = Literal["onnx", "executorch"]

Outputs = Literal["caller", "planned"]
"""Owner of the memory of an ExecuTorch program's outputs: the caller, or the memory plan of the program."""

FORMATS: tuple[FormatName, ...] = get_args(FormatName)

EXECUTORCH_DTYPES: Mapping[int, str] = {
    0: "uint8",
    1: "int8",
    2: "int16",
    3: "int32",
    4: "int64",
    5: "float16",
    6: "float32",
    7: "float64",
    11: "bool",
    27: "uint16",
    28: "uint32",
    29: "uint64",
}
"""Port dtype of each ExecuTorch element type number. Types that no port has are left out."""


def check_outputs(outputs: Outputs, formats: Iterable[str]) -> None:
    """Raise ConfigError if the outputs are to be planned and none of the formats is ExecuTorch."""
    if outputs == "planned" and "executorch" not in (names := tuple(formats)):
        raise ConfigError(
            f"only ExecuTorch programs have planned outputs, and the format is {', '.join(names)}: choose executorch, or "
            "leave outputs out",
            formats=names,
        )


_RELEASE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}")


def is_release(text: str) -> bool:
    """Return True if ``text`` is a release as in manifests: up to four numbers with dots between them."""
    return _RELEASE.fullmatch(text) is not None


def is_older(version: str, least: str) -> bool:
    """Return True if ``version`` comes before the release ``least``.

    Numbers are compared one by one, and missing ones are 0. What follows the numbers, such as ``rc1`` or ``+cpu``, does not
    count. A version that begins with no number counts as new.
    """
    found = _RELEASE.match(version)
    return found is not None and numbers_of(found[0]) < numbers_of(least)


def numbers_of(release: str) -> tuple[int, ...]:
    """Return the four numbers of a release, for a comparison."""
    numbers = [int(number) for number in release.split(".")]
    return (*numbers, *[0] * (4 - len(numbers)))

"""Formats of graphs, and versions of the runtimes that load them. Each engine has the name of the format that it loads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from edgefl.errors import ConfigError

FormatName = Literal["onnx", "executorch"]

Outputs = Literal["caller", "planned"]
"""Owner of the memory for an ExecuTorch program's outputs: the caller, or the program's own memory plan."""

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
"""Numpy name of each ExecuTorch element type. Types that ports do not support are omitted."""


def check_outputs(outputs: Outputs, formats: Iterable[str]) -> None:
    """Check that a format supports the chosen owner of output memory.

    Args:
        outputs: "planned": the program returns outputs in its own memory. "caller": the caller provides their
            memory.
        formats: Names of the formats to compile to.

    Raises:
        ConfigError: ``outputs`` is "planned" and ``formats`` does not contain executorch.
    """
    if outputs == "planned" and "executorch" not in (names := tuple(formats)):
        raise ConfigError(
            f"only ExecuTorch programs have planned outputs, and the format is {', '.join(names)}: choose executorch, or "
            "leave outputs out",
            formats=names,
        )


_RELEASE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}")


def is_release(text: str) -> bool:
    """Return True if ``text`` is a release number as manifests have it: one to four numbers, separated by dots."""
    return _RELEASE.fullmatch(text) is not None


def is_older(version: str, least: str) -> bool:
    """Return True if ``version`` is lower than the release ``least``.

    Numbers are compared one by one; missing ones are 0. A suffix such as ``rc1`` or ``+cpu`` is ignored. The result is
    False if ``version`` does not begin with a number.
    """
    found = _RELEASE.match(version)
    return found is not None and numbers_of(found[0]) < numbers_of(least)


def numbers_of(release: str) -> tuple[int, ...]:
    """Return the numbers of a release, padded with zeros to four, so that tuples compare like releases.

    Args:
        release: One to four numbers separated by dots (:func:`is_release`).
    """
    numbers = [int(number) for number in release.split(".")]
    return (*numbers, *[0] * (4 - len(numbers)))

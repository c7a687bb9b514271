"""Releases of runtimes, as manifests name them and agents compare them: ``1.9.2`` is older than ``1.15``."""

from __future__ import annotations

import re

_RELEASE = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}")


def is_release(text: str) -> bool:
    """Return True if ``text`` is a release as a manifest has it: up to four numbers with dots between them."""
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

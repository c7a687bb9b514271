"""Catalog of all architectures, and of those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.models.architecture import LIBRARIES, Architecture, Library
from benchmarks.models.encoders import DECODERS, ENCODERS, HEARING
from benchmarks.models.held_out import plain as held_out_plain
from benchmarks.models.held_out.transformer_library import OTHERS, TEXTS
from benchmarks.models.plain import PLAIN, TIMM, TORCHVISION
from benchmarks.models.seeing import SEEING
from edgefl.errors import ConfigError

HELD_OUT: tuple[Architecture, ...] = (
    *held_out_plain.PLAIN,
    *TEXTS,
    *OTHERS,
    *held_out_plain.TORCHVISION,
    *held_out_plain.TIMM,
)
ARCHITECTURES: tuple[Architecture, ...] = (
    *PLAIN,
    *ENCODERS,
    *DECODERS,
    *SEEING,
    *HEARING,
    *TORCHVISION,
    *TIMM,
)


def chosen(
    only: Sequence[str] = (), libraries: Sequence[Library] = (), *, held_out: bool = False
) -> list[Architecture]:
    """Return the architectures whose name, class or ``library/name`` matches a pattern.

    Args:
        only: patterns of file names, in any case; none: all architectures.
        libraries: libraries to search; none: all.
        held_out: search the held-out ones.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    suite = HELD_OUT if held_out else ARCHITECTURES
    among = [each for each in suite if each.library in (libraries or LIBRARIES)]
    for pattern in only:
        if not any(_matches(each, pattern) for each in among):
            raise ConfigError(
                f"no architecture matches {pattern!r}; choose among: {', '.join(each.path for each in among)}",
                pattern=pattern,
            )
    return [each for each in among if not only or any(_matches(each, pattern) for pattern in only)]


def named(path: str) -> Architecture:
    """Return the architecture ``library/name``, in the suite or held out. Raises ConfigError."""
    for each in (*ARCHITECTURES, *HELD_OUT):
        if each.path == path:
            return each
    raise ConfigError(
        f"no architecture {path!r}; `python -m benchmarks models --help` shows how to choose one", path=path
    )


def _matches(architecture: Architecture, pattern: str) -> bool:
    names = (architecture.name, architecture.kind, architecture.path)
    return any(fnmatchcase(name.lower(), pattern.lower()) for name in names)

"""All architectures of the suite, and those that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from benchmarks.suite.architecture import LIBRARIES, Architecture, Library
from benchmarks.suite.encoders import DECODERS, ENCODERS, HEARING
from benchmarks.suite.held_out.catalog import HELD_OUT
from benchmarks.suite.plain import PLAIN, TIMM, TORCHVISION
from benchmarks.suite.seeing import SEEING
from edgefl.errors import ConfigError

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
    """Those of the ``libraries`` (none: all) whose name, class or ``library/name`` matches one of the patterns ``only``, as
    of file names and in any case (none: all); of the suite, or of the ``held_out`` ones. ConfigError for a pattern that
    none matches."""
    suite = HELD_OUT if held_out else ARCHITECTURES
    among = [each for each in suite if each.library in (libraries or LIBRARIES)]
    for pattern in only:
        if not any(_matches(each, pattern) for each in among):
            raise ConfigError(
                f"no architecture matches {pattern!r}; there are: {', '.join(each.path for each in among)}",
                pattern=pattern,
            )
    return [each for each in among if not only or any(_matches(each, pattern) for pattern in only)]


def named(path: str) -> Architecture:
    """The one of this ``library/name``, in the suite or held out; ConfigError if there is none."""
    for each in (*ARCHITECTURES, *HELD_OUT):
        if each.path == path:
            return each
    raise ConfigError(f"there is no architecture {path!r}", path=path)


def _matches(architecture: Architecture, pattern: str) -> bool:
    names = (architecture.name, architecture.kind, architecture.path)
    return any(fnmatchcase(name.lower(), pattern.lower()) for name in names)

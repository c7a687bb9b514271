"""``python -m tests.fuzz TARGET [libFuzzer options]``: one decoder under atheris, as long as it is let.

Needs `pip install atheris`. Coverage guides it through Python only: msgspec, zlib and zstd are looked at from outside.

    python -m tests.fuzz manifests -max_total_time=60
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris  # type: ignore[import-not-found]

with atheris.instrument_imports(include=["edgefl.wire"]):
    from tests.fuzz.targets import TARGETS

from tests.fuzz.corpus import golden


def main(name: str, options: list[str]) -> None:
    target, genuine = TARGETS[name]
    with tempfile.TemporaryDirectory(prefix="edgefl-corpus-") as folder:
        for number, data in enumerate(golden(*genuine)):
            (Path(folder) / str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], *options, folder], target)
        atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in TARGETS:
        sys.exit(f"name one of {', '.join(TARGETS)}")
    main(sys.argv[1], sys.argv[2:])

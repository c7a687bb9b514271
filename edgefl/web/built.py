"""The page's files, which `make agents-web` builds and a wheel has."""

from __future__ import annotations

import os
from pathlib import Path

from edgefl.errors import ConfigError

VARIABLE = "EDGEFL_WEB_PAGE"
"""Names another folder: the page of another build."""
STATIC = Path(__file__).parent / "static"
PACKED = ".gz"
"""Behind the name of a file that is kept as browsers get it, with gzip."""
_NEEDED = ("index.html", "worker.js", "ort/ort-wasm-simd-threaded.wasm" + PACKED)


def built_page() -> Path:
    """The folder with the page; ConfigError where it was never built."""
    folder = Path(os.environ.get(VARIABLE, "") or STATIC)
    missing = [name for name in _NEEDED if not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"the page for browsers is not built ({missing[0]} is missing in {folder}): run `make agents-web` in a checkout "
            "(it needs Node 20 and npm), or install a wheel of a release",
            missing=tuple(missing),
        )
    return folder

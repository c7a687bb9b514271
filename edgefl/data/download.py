"""Download of published files. A file gets its name only after its checksum was verified."""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from edgefl.errors import DataError
from edgefl.system.files import replacing

# (file, bytes so far, bytes in all or 0 if the server does not say)
Progress = Callable[[str, int, int], None]

PIECE, _TIMEOUT_S = 1 << 16, 20.0


def fetch(
    urls: Sequence[str], target: Path, md5: str, *, of: str, remedy: str, progress: Progress | None = None
) -> None:
    """Download a file from the first URL that has it. Creates missing folders, and replaces an existing file.

    Args:
        urls: URLs of folders that contain the file.
        target: Path of the file. Its name is appended to each URL.
        md5: Published MD5 of the file.
        of: Name of the dataset, for the error text.
        remedy: End of the error text.
        progress: Called with file name, bytes so far and bytes in all (0: unknown). None: print the progress.

    Raises:
        DataError: No URL has the file with this MD5. The message lists the problem of each.
    """
    problems = []
    target.parent.mkdir(parents=True, exist_ok=True)
    for base in urls:
        try:
            with replacing(target) as file:
                digest = _copy(base + target.name, file, progress or print_progress)
                if digest != md5:
                    raise ValueError(f"the file's MD5 is {digest}, published is {md5}")
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            problems.append(f"{base}: {getattr(error, 'reason', error)}")
        else:
            return
    raise DataError(
        f"cannot download {target.name} of {of} ({'; '.join(problems)}). {remedy}",
        file=target.name,
        problems=problems,
    )


def _copy(url: str, file: BinaryIO, progress: Progress) -> str:
    """Copy the data of a URL into the open ``file``, and return their MD5 in hexadecimal.

    Calls ``progress`` after each piece.
    """
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
        total, done = int(response.headers.get("Content-Length") or 0), 0
        while piece := response.read(PIECE):
            file.write(piece)
            digest.update(piece)
            done += len(piece)
            progress(url.rsplit("/", 1)[-1], done, total)
    return digest.hexdigest()


def print_progress(file: str, done: int, total: int) -> None:
    """Print the progress of a download on stderr, in one line that each call overwrites.

    Args:
        file: Name of the file.
        done: Bytes so far.
        total: Bytes in all. 0: unknown.
    """
    share = f"{done / total:4.0%}" if total else f"{done:,} bytes"
    print(f"\r{file} {share}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def md5_of(path: Path) -> str:
    """Return the MD5 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

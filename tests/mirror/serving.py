"""A mirror's process in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgefl.mirror.blobs import CacheSettings
from edgefl.mirror.serve import MirrorAddress, MirrorServer
from tests.mirror.hostile import PATIENCE_S


@contextmanager
def serving(
    folder: Path,
    *,
    upstream: CacheSettings | None = None,
    cert_file: str = "",
    key_file: str = "",
    port: int = 0,
    told: list[str] | None = None,
) -> Iterator[MirrorServer]:
    server = MirrorServer(
        folder, MirrorAddress(port=port, cert_file=cert_file, key_file=key_file), upstream=upstream, log=told
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()

"""Acts on what the server said before something else."""

from __future__ import annotations

from edgefl_device.link.identity import ServerTrust


def plant() -> None:
    ServerTrust._in_order = lambda *_: None  # type: ignore[method-assign, assignment]

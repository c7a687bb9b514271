"""Events of a server, as tests need them."""

from __future__ import annotations

from typing import Any

from edgefl_server.events import RoundClosed


def round_closed(number: int = 1, **changes: Any) -> RoundClosed:
    """Return the end of a round that two devices reported in."""
    fields = {"round": number, "outcome": "closed", "accuracy": 0.5, "loss": 1.0, "train_loss": 1.0}
    fields |= {"seconds": 1.0, "reports": 2, "rejected": 0, "weights_sha256": f"{number % 10}" * 64}
    fields |= {"down_bytes": 1, "up_bytes": 2, "server_down_bytes": 3}
    return RoundClosed(**{**fields, **changes})

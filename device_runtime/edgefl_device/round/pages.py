"""What an announcement offers, where that is too much for one message: a blob, for devices that need it."""

from __future__ import annotations

from edgefl.errors import BundleError
from edgefl.system.sizes import size
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import Round
from edgefl_device.round.graphs import Blobs


def whole_of(announced: Round, blobs: Blobs, limits: Limits) -> Round:
    """The announcement with all that it offers. BundleError if that is more than a device reads, or cannot be had."""
    page = announced.pages
    if page is None:
        return announced
    largest = max(page.size, page.raw)
    if largest > limits.max_manifest_bytes:
        raise BundleError(
            f"the page of the announcement of round {announced.round} has {size(largest)}, more than this device reads: "
            "raise limits.max_manifest_bytes, or have the server use larger chunks",
            size=largest,
            limit=limits.max_manifest_bytes,
        )
    return announced.whole(blobs.get(page))

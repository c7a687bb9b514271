"""Reason codes with which a device declines a task or reports a failure, and the server's text for each.

A device sends only the code. Paths, values of its data and messages of its engine stay in its own log.
"""

from __future__ import annotations

from edgefl.errors import BundleError, DataError, EdgeflError, ProtocolError, StoreError
from edgefl.wire.mqtt import messages
from edgefl.wire.text import printable

BUNDLE, DATA, STORE, ENGINE = "bundle", "data", "store", "engine"
_IN_LOG = "the device's own log has the details"

TEXTS = {
    messages.NO_CARRY: "the device has nothing from an earlier round that the algorithm can go on from",
    messages.NO_FORMAT: "the tier has no bundle in the format that the device's engine runs: add the format to `formats` "
    "in [export], or start the device with another `engine`",
    messages.NO_MEMORY: "a graph or blob needs more memory than the device offers: give it more (`edgefl device --memory`), "
    "or a tier that needs less",
    messages.WRONG_DATA: f"the device's data do not fit the model, or have rows that cannot be read; {_IN_LOG}",
    messages.POLICY: f"the policy of the device does not allow it, or not now; {_IN_LOG}",
    messages.TOO_MUCH: f"the work takes more steps, time or disk than the device gives; {_IN_LOG}",
    messages.LARGE_CHUNKS: "the chunks of a blob are larger than the messages that the device reads: raise the device's "
    "limits.max_message_bytes, or set limits.chunk_bytes of the federation lower",
    messages.CRASHED: f"the work ended the process of the device or of its engine; {_IN_LOG}",
    messages.LOST_CHUNK: "neither the broker nor a mirror has all the blobs of the round",
    BUNDLE: f"the bundle or the announcement cannot be used; {_IN_LOG}",
    DATA: f"the device's data cannot be used; {_IN_LOG}",
    STORE: f"the device's store is full or cannot be used; {_IN_LOG}",
    ENGINE: f"the engine of the device failed; {_IN_LOG}",
    messages.BUSY: "rounds or other requests left no time: ask again later, or with a longer `timeout`",
    messages.NO_BUNDLE: "no bundle has the format that the device's engine runs: export one (`edgefl export "
    "--format`)",
    messages.SIGNATURE: "the request or the bundle is not signed by a server that the device trusts",
    messages.LATE: "the profile was not done in time: ask with a longer `timeout`",
    messages.TOO_LARGE: "the request or the profile is larger than the device's limits: ask for fewer repetitions, "
    "or raise its `chunk_bytes`",
    messages.PROFILE_FAILED: f"nothing was measured; {_IN_LOG}",
}


def reason_text(code: str, text: str = "") -> str:
    """Return the explanation of a reason code for display, or "" if the code is unknown.

    Args:
        code: Reason code.
        text: Explanation that the device sent. If it is not empty, it is returned instead, cleaned.
    """
    return printable(text) or TEXTS.get(code, "")


def failure_code(error: Exception) -> str:
    """Return the reason code that a device sends for the exception of a failed attempt. :data:`ENGINE` if it is unknown."""
    if isinstance(error, EdgeflError) and error.message.startswith(messages.LOST_CHUNK):
        return messages.LOST_CHUNK
    kinds = {DataError: DATA, StoreError: STORE, BundleError: BUNDLE, ProtocolError: BUNDLE}
    return next((code for kind, code in kinds.items() if isinstance(error, kind)), ENGINE)

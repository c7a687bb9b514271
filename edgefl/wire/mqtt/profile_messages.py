"""The messages of ``edgefl profile --fleet``: a device is asked what a bundle costs on it, and answers.

Nothing of a training run depends on them: a device that does not know them stays silent.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgefl.wire.blobs import BlobRef
from edgefl.wire.mqtt.messages import Message

Nonce = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{8,64}\Z")]
"""Part of topics: nothing else may be in it."""
MOST_REPEATS = 1000
Repeat = Annotated[int, msgspec.Meta(ge=1, le=MOST_REPEATS)]
Wait = Annotated[float, msgspec.Meta(gt=0, le=86_400)]

BUSY = "busy"
NO_BUNDLE = "no-bundle"
SIGNATURE = "signature"
LATE = "late"
TOO_LARGE = "too-large"
FAILED = "failed"


class ProfileOffer(Message, frozen=True, kw_only=True):
    """``profiles/<nonce>/offer``, retained: the blobs that lie below ``profiles/<nonce>/blobs`` for a request.

    Whoever asks next clears what is there after ``until`` (seconds since 1970): its owner was killed.
    """

    until: float
    blobs: tuple[BlobRef, ...]


class ProfileRequest(Message, frozen=True, kw_only=True):
    """``devices/<id>/profile-requests``: measure the bundle of your engine's format, and answer within ``within_s`` seconds.

    ``bundles`` and ``signatures`` are by format. Each graph is run ``repeat`` times. The same request may come any number
    of times.
    """

    nonce: Nonce
    bundles: dict[str, BlobRef]
    within_s: Wait
    repeat: Repeat = 20
    signatures: dict[str, bytes] = msgspec.field(default_factory=dict)


class ProfileAnswer(Message, frozen=True, kw_only=True):
    """``devices/<id>/profiles``: the device's word on a request; ``done`` and ``declined`` are the last one.

    ``profile`` holds an encoded :class:`edgefl.wire.bundle.profiles.BundleProfile` when ``state`` is ``done``.
    ``reason`` is a short code where it is ``declined``; ``text`` stays empty.
    """

    nonce: str
    state: Literal["taken", "done", "declined"]
    reason: str = ""
    text: str = ""
    profile: bytes = b""


def declined(nonce: str, reason: str) -> ProfileAnswer:
    """Return an answer without a profile."""
    return ProfileAnswer(nonce=nonce, state="declined", reason=reason)

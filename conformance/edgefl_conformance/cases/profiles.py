"""Requests for a profile, which an agent may leave unanswered."""

from __future__ import annotations

import secrets
import time

from edgefl.errors import ProtocolError
from edgefl.wire.blobs import BlobRef, describe, split
from edgefl.wire.bundle import profiles
from edgefl.wire.mqtt.messages import ProfileAnswer, ProfileOffer, ProfileRequest, encode
from edgefl_conformance.case import Group
from edgefl_conformance.play.said import Said
from edgefl_conformance.play.stage import Stage
from edgefl_conformance.verdict import Failed, expect, expect_equal

PROFILES = Group("profiles")
_CHUNK = 1 << 16
_WITHIN_S = 60.0


@PROFILES.case(
    "Answers a request for a profile: `taken`, and then `done` with the profile of that bundle.",
    optional=True,
)
def profile(stage: Stage) -> None:
    stage.ensure()
    nonce, ref = _asked(stage, sign=True)
    taken = _answer(stage, nonce, ("taken", "done", "declined"), 8.0)
    if taken is None:
        raise Failed("an answer to the request", "none")
    last = _answer(stage, nonce, ("done", "declined"), _WITHIN_S)
    expect(last is not None, "a last word", "none")
    assert last is not None
    expect_equal("answer.state", "done", f"{last.state} {last.reason} {last.text}".strip())
    try:
        found = profiles.decode(last.profile)
    except ProtocolError as error:
        raise Failed("a BundleProfile", error.message) from error
    expect_equal("profile.bundle", ref.sha256, found.bundle)


@PROFILES.case("Measures no bundle that the server did not sign, as it knows the server's key.")
def unsigned_profile(stage: Stage) -> None:
    stage.ensure()
    nonce, _ = _asked(stage, sign=False)
    done = _answer(stage, nonce, ("done",), 4.0)
    expect(done is None, "no profile of a bundle without a signature", "one that is done")
    stage.good_round()


def _asked(stage: Stage, *, sign: bool) -> tuple[str, BlobRef]:
    """Ask for a profile of the plain bundle; gives the request's nonce, and the bundle's reference."""
    nonce, bundle = secrets.token_hex(8), stage.material().bundle
    topics = stage.server.topics.profile(nonce)
    ref, blobs = bundle.ref(_CHUNK), dict(bundle.blobs)
    listed = [ref, *(describe(data, _CHUNK) for data in blobs.values())]
    until = time.time() + stage.patient(_WITHIN_S)
    stage.server.publish(topics.offer, encode(ProfileOffer(until=until, blobs=tuple(listed))), retain=True)
    for each in listed:
        data = bundle.encoded if each == ref else blobs[each.sha256]
        for index, piece in enumerate(split(data, _CHUNK)):
            stage.server.publish(topics.blob_chunk(each.sha256, index), piece, retain=True)
    request = ProfileRequest(
        nonce=nonce,
        bundles={stage.setup.engine: ref},
        within_s=stage.patient(_WITHIN_S),
        repeat=1,
        signatures={stage.setup.engine: stage.server.sign_bundle(ref)} if sign else {},
    )
    topic = stage.server.mine.profile_requests
    stage.server.publish(topic, stage.server.seal(topic, request))
    return nonce, ref


def _answer(stage: Stage, nonce: str, states: tuple[str, ...], within_s: float) -> ProfileAnswer | None:
    def its(said: Said) -> bool:
        message = said.message
        return isinstance(message, ProfileAnswer) and message.nonce == nonce and message.state in states

    said = stage.server.log.wait(0, "profiles", stage.patient(within_s), its)
    return said.message if said is not None and isinstance(said.message, ProfileAnswer) else None

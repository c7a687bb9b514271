"""Requests for a profile, which an agent may leave unanswered."""

from __future__ import annotations

import secrets
import time

from edgefl.errors import ProtocolError
from edgefl.wire.blobs import BlobRef, describe, split
from edgefl.wire.bundle import profiles
from edgefl.wire.mqtt.messages import ProfileAnswer, ProfileOffer, ProfileRequest, encode
from edgefl_conformance.case import CaseGroup
from edgefl_conformance.play.harness import RoundHarness
from edgefl_conformance.play.messages import AgentMessage
from edgefl_conformance.results import CaseFailed, expect, expect_equal

PROFILES = CaseGroup("profiles")
_CHUNK = 1 << 16
_WITHIN_S = 60.0


@PROFILES.case(
    "Answers a request for a profile: `taken`, and then `done` with the profile of that bundle.",
    optional=True,
)
def profile(harness: RoundHarness) -> None:
    harness.ensure()
    nonce, ref = _asked(harness, sign=True)
    taken = _answer(harness, nonce, ("taken", "done", "declined"), 8.0)
    if taken is None:
        raise CaseFailed("an answer to the request", "none")
    last = _answer(harness, nonce, ("done", "declined"), _WITHIN_S)
    expect(last is not None, "a last word", "none")
    assert last is not None
    expect_equal("answer.state", "done", f"{last.state} {last.reason} {last.text}".strip())
    try:
        found = profiles.decode(last.profile)
    except ProtocolError as error:
        raise CaseFailed("a BundleProfile", error.message) from error
    expect_equal("profile.bundle", ref.sha256, found.bundle)


@PROFILES.case("Measures no bundle that the server did not sign, as it knows the server's key.")
def unsigned_profile(harness: RoundHarness) -> None:
    harness.ensure()
    nonce, _ = _asked(harness, sign=False)
    done = _answer(harness, nonce, ("done",), 4.0)
    expect(done is None, "no profile of a bundle without a signature", "one that is done")
    harness.good_round()


def _asked(harness: RoundHarness, *, sign: bool) -> tuple[str, BlobRef]:
    """Request a profile of the plain bundle; return the request's nonce, and the bundle's reference."""
    nonce, bundle = secrets.token_hex(8), harness.material().bundle
    topics = harness.server.topics.profile(nonce)
    ref, blobs = bundle.ref(_CHUNK), dict(bundle.blobs)
    listed = [ref, *(describe(data, _CHUNK) for data in blobs.values())]
    until = time.time() + harness.patient(_WITHIN_S)
    harness.server.publish(topics.offer, encode(ProfileOffer(until=until, blobs=tuple(listed))), retain=True)
    for each in listed:
        data = bundle.encoded if each == ref else blobs[each.sha256]
        for index, piece in enumerate(split(data, _CHUNK)):
            harness.server.publish(topics.blob_chunk(each.sha256, index), piece, retain=True)
    request = ProfileRequest(
        nonce=nonce,
        bundles={harness.setup.engine: ref},
        within_s=harness.patient(_WITHIN_S),
        repeat=1,
        signatures={harness.setup.engine: harness.server.sign_bundle(ref)} if sign else {},
    )
    topic = harness.server.mine.profile_requests
    harness.server.publish(topic, harness.server.seal(topic, request))
    return nonce, ref


def _answer(
    harness: RoundHarness, nonce: str, states: tuple[str, ...], within_s: float
) -> ProfileAnswer | None:
    def its(said: AgentMessage) -> bool:
        message = said.message
        return isinstance(message, ProfileAnswer) and message.nonce == nonce and message.state in states

    said = harness.server.log.wait(0, "profiles", harness.patient(within_s), its)
    return said.message if said is not None and isinstance(said.message, ProfileAnswer) else None

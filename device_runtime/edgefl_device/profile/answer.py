"""A profile in one message: what people can do without goes first where it would be too large."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from edgefl.wire.bundle import profiles
from edgefl.wire.bundle.profiles import BundleProfile, MemoryTimeline
from edgefl.wire.mqtt.messages import ENVELOPE_BYTES, TOO_LARGE, ProfileAnswer, declined
from edgefl_device.profile.measure.sampler import thinned


def answer_with(nonce: str, profile: BundleProfile, limit: int) -> ProfileAnswer:
    """Return an answer with ``profile`` of at most ``limit`` bytes; it declines if even the shortest form is too large."""
    room = max(limit // 2, limit - ENVELOPE_BYTES)
    for shorter in _shorter(profile):
        data = profiles.encode(shorter)
        if len(data) <= room:
            return ProfileAnswer(nonce=nonce, state="done", profile=data)
    return declined(nonce, TOO_LARGE)


def _shorter(profile: BundleProfile) -> Iterator[BundleProfile]:
    """Yield ``profile`` with less and less in it: without points of time, then ops, then the multi-step forward pass."""
    yield profile
    for most in (100, 50, 20):
        timeline = msgspec.structs.replace(profile.timeline, moments=thinned(profile.timeline.moments, most))
        yield msgspec.structs.replace(profile, timeline=timeline)
    bare = msgspec.structs.replace(profile, timeline=MemoryTimeline(moments=(), spans=()))
    for most in (12, 6, 3, 0):
        graphs = tuple(msgspec.structs.replace(graph, ops=graph.ops[:most]) for graph in bare.graphs)
        yield msgspec.structs.replace(bare, graphs=graphs)
    yield msgspec.structs.replace(bare, graphs=graphs, io=())

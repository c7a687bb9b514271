"""Validation of an update's envelope: size, message, codec, and the figures that the device reports."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from edgefl.errors import DIVERGED, ProtocolError, UpdateRejected
from edgefl.facts import shipped
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.mqtt.messages import NO_CARRY, Decline, ResourceUsage, Update, UpdateChunk, decode
from edgefl.wire.mqtt.reasons import reason_text
from edgefl.wire.mqtt.topics import PublishTraffic
from edgefl.wire.text import printable
from edgefl.wire.update.form import Form
from edgefl_server.coordinator.states import MOST_REASON, MOST_SAMPLES
from edgefl_server.events import REPORTED, DeviceSeen, UpdateAccepted
from edgefl_server.round_aggregation import RoundAggregation

_MAX_METRICS = 64
_MAX_NAME = 64
_MAX_VALUE = 200
_MAX_MS = 1e12
_MAX_BYTES = 2**53
"""Largest download that a device may report: any journal can add up a million of them."""
_REASON = re.compile(rf"[a-z0-9-]{{1,{MOST_REASON}}}")


class _StrictUsage(ResourceUsage, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _StrictUpdate(Update, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Update message whose decoder refuses unknown fields.

    Other messages ignore them. But the bytes of an update are stored as received, so unknown fields would be stored
    too.
    """

    profile: _StrictUsage


# -- refusals ----------------------------------------------------------------------------------------------------


def check_size(chunk: UpdateChunk, tier: str, aggregation: RoundAggregation) -> None:
    """Check the size that a chunk declares for its whole update, before any of its data are stored.

    Args:
        chunk: Any chunk of the update.
        tier: Tier of the device's task.
        aggregation: Round that receives updates.

    Raises:
        UpdateRejected: If the size is larger than that of any valid update of this tier.
    """
    limit = aggregation.max_update_bytes(tier)
    if chunk.size > limit:
        raise UpdateRejected(
            "too-large",
            f"the update has {chunk.size} bytes, and one of tier {tier!r} has {limit} at most: send its tensors and "
            "nothing else",
            size=chunk.size,
        )


def decode_update(data: bytes) -> Update:
    """Decode an update and refuse unknown fields.

    Args:
        data: The reassembled bytes.

    Returns:
        The message. Its tensors are still encoded.

    Raises:
        UpdateRejected: If the bytes are malformed.
    """
    try:
        return decode(_StrictUpdate, data)
    except ProtocolError as error:
        raise UpdateRejected("malformed", error.message) from error


def check_codec(update: Update, form: Form) -> None:
    """Check that an update is encoded by its tier's codec, and that its metrics do not show a divergence.

    Args:
        update: The decoded message.
        form: Arrays that the tier's codec sends.

    Raises:
        UpdateRejected: If codec or version differ, or if an encoded update reports that training diverged.
    """
    if update.codec == form.codec and update.codec_version == form.version:
        # Codes of few bits cannot hold a NaN. The reported metrics are the only place where it shows.
        diverged = sorted(name for name, value in update.metrics.items() if not math.isfinite(value))
        if form.sections and diverged:
            name = diverged[0][:_MAX_NAME]
            raise UpdateRejected(
                "not-finite", f"metric {name} is not finite: {DIVERGED}; lower the learning rate", name=name
            )
        if form.silent and "loss" not in update.metrics:
            raise UpdateRejected(
                "malformed",
                f"the update reports no metric 'loss', and codes of {form.codec!r} cannot show that training diverged: "
                "report the loss, or choose a codec that sends scales",
            )
        return
    actual = f"{update.codec[:64]!r} version {update.codec_version}"
    expected = f"{form.codec!r} version {form.version}"
    if update.codec not in shipped().codecs:
        text = f"the update is coded by {actual}, which this server does not know; its tier is coded by {expected}"
        raise UpdateRejected("unknown-codec", text, codec=update.codec[:64])
    text = f"the update is coded by {actual}, its tier by {expected}; fetch the tier's bundle again"
    raise UpdateRejected("wrong-codec", text, codec=update.codec[:64])


def decline_reason(decline: Decline, *, carry_needed: bool) -> tuple[str, str]:
    """Return the code and the text of a decline, as the server may repeat them.

    Args:
        decline: The device's message.
        carry_needed: True if the device's bundle needs the state that earlier rounds left on a device.

    Returns:
        (code, text). The code is ``other`` if it is malformed or cannot apply; the text is printable.
    """
    text = reason_text(decline.reason, decline.text)
    if not _REASON.fullmatch(decline.reason):
        return "other", text
    if decline.reason == NO_CARRY and not carry_needed:
        return "other", f"{text} (it says {NO_CARRY!r}, and nothing of the kind is needed)"
    return decline.reason, text


# -- figures that devices report ---------------------------------------------------------------------------------


def finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of ``metrics`` that are finite, at most 64, under printable names of at most 64 characters."""
    names = sorted(name for name, value in metrics.items() if math.isfinite(value))
    return {printable(name, _MAX_NAME): float(metrics[name]) for name in names[:_MAX_METRICS]}


def reported_download(update: Update) -> PublishTraffic:
    """Return the download that the device reports for its round, clamped to the range of the journal's columns."""
    counts = (update.profile.down_bytes, update.profile.down_wire_bytes)
    return PublishTraffic(*(max(0, min(count, _MAX_BYTES)) for count in counts))


def train_ms(update: Update, manifest: Manifest) -> float:
    """Return the milliseconds of all local steps: the reported time of a step times the number of steps.

    The number follows from the reported samples and the bundle's ``manifest``. 0 if the result is implausible.
    """
    steps = sum(manifest.steps_with(max(0, min(update.samples, MOST_SAMPLES))))
    milliseconds = steps * update.profile.step_ms
    return milliseconds if 0 < milliseconds < _MAX_MS else 0.0


def accepted_event(update: Update, sha256: str, weight: int) -> UpdateAccepted:
    """Return the event of an accepted update."""
    return UpdateAccepted(
        device=update.device,
        tier=update.tier,
        round=update.round,
        nonce=update.nonce,
        sha256=sha256,
        weight=weight,
    )


def report_event(update: Update, down: PublishTraffic, up: PublishTraffic) -> DeviceSeen:
    """Return the event with the figures that a device reports of its round.

    ``down`` and ``up`` are the sizes of the messages that it received and sent for it.
    """
    return DeviceSeen(
        device=update.device,
        tier=update.tier,
        round=update.round,
        stage=REPORTED,
        loss=update.metrics.get("loss", float("nan")),
        step_ms=update.profile.step_ms,
        peak_bytes=update.profile.peak_bytes,
        down_bytes=down.payload,
        up_bytes=up.payload,
        down_wire_bytes=down.wire,
        up_wire_bytes=up.wire,
        idle_bytes=update.profile.idle_bytes,
        forward_ms=update.profile.forward_ms,
        variants=_bound_texts(update.profile.variants),
        dropped=_bound_texts(update.profile.dropped),
    )


def _bound_texts(texts: Mapping[str, str]) -> dict[str, str]:
    """Return at most 64 of the device's ``texts``, by name; names and texts are made printable and cut to a limit."""
    names = sorted(texts)[:_MAX_METRICS]
    return {printable(name, _MAX_NAME): printable(texts[name], _MAX_VALUE) for name in names}

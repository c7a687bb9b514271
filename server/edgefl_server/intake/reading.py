"""What an update must be before its numbers are looked at: its size, its message, how it is coded."""

from __future__ import annotations

import math

from edgefl.errors import DIVERGED, ProtocolError, UpdateRejected
from edgefl.facts import shipped
from edgefl.wire.mqtt.messages import Profile, Update, UpdateChunk, decode
from edgefl.wire.update.form import Form
from edgefl_server.taking.active import ActiveRound


class _BareProfile(Profile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class _BareUpdate(Update, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An update and nothing else. Elsewhere unknown fields are passed over; but an update is kept as it came, for a second
    server process to add up, and whatever else is in it would be kept with it."""

    profile: _BareProfile


def check_size(chunk: UpdateChunk, tier: str, active: ActiveRound) -> None:
    """UpdateRejected, before anything is kept, for an update that claims more bytes than its tier's may have."""
    most = active.most_bytes(tier)
    if chunk.size > most:
        raise UpdateRejected(
            "too-large",
            f"the update has {chunk.size} bytes, and one of tier {tier!r} has {most} at most: send its tensors and "
            "nothing else",
            size=chunk.size,
        )


def check_codec(update: Update, form: Form) -> None:
    """UpdateRejected unless the update is coded as its tier is told to."""
    if update.codec == form.codec and update.codec_version == form.version:
        wrong = sorted(name for name, value in update.metrics.items() if not math.isfinite(value))
        if form.sections and wrong:  # a NaN has no code, but it shows in what training reports
            raise UpdateRejected(
                "not-finite",
                f"metric {wrong[0][:64]} is not finite: {DIVERGED}; lower the learning rate",
                name=wrong[0][:64],
            )
        if form.silent and "loss" not in update.metrics:
            raise UpdateRejected(
                "malformed",
                f"the update reports no metric 'loss', and codes of {form.codec!r} cannot show that training diverged: "
                "report the loss, or choose a codec that sends scales",
            )
        return
    own = f"{update.codec[:64]!r} version {update.codec_version}"
    wanted = f"{form.codec!r} version {form.version}"
    if update.codec not in shipped().codecs:
        text = f"the update is coded by {own}, which this server does not know; its tier is coded by {wanted}"
        raise UpdateRejected("unknown-codec", text, codec=update.codec[:64])
    text = f"the update is coded by {own}, its tier by {wanted}; fetch the tier's bundle again"
    raise UpdateRejected("wrong-codec", text, codec=update.codec[:64])


def decoded(data: bytes) -> Update:
    """The update in these bytes, and nothing else; UpdateRejected for what is none."""
    try:
        return decode(_BareUpdate, data)
    except ProtocolError as error:
        raise UpdateRejected("malformed", error.message) from error

"""Every timeout, size and limit in one place, with the reason for each default."""

from __future__ import annotations

from typing import Annotated

import msgspec

from edgefl.errors import ConfigError

_LONGEST_S = 1e8
"""Three years. Upper bounds also keep out infinity; NaN is outside of every range."""

MOST_CHUNK_BYTES = 1 << 27
"""Half of the largest packet of MQTT."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=_LONGEST_S)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
Pause = Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_S)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts, sizes and rates of server and devices: sizes in bytes, times in seconds.

    Set them in the ``[limits]`` table of a federation file.
    """

    chunk_bytes: Annotated[int, msgspec.Meta(ge=256, le=MOST_CHUNK_BYTES)] = 128 * 1024
    """Payload of one MQTT message. 128 KiB is what the strictest hosted broker accepts. Below 256 bytes the fields around
    the data would not fit."""

    fetch_window: Count = 8
    """Chunks a device subscribes to at a time: 1 MiB in flight fills a link and stays far below the
    1,000 messages after which Mosquitto drops a client's queue."""

    fetch_timeout_s: Seconds = 10.0
    """Time a device waits for any chunk of its window before it subscribes again."""

    fetch_retries: Count = 5
    """Attempts without a single valid chunk before the download of a blob fails. A damaged or missing blob must not keep a
    device awake."""

    mirror_bytes_s: Bytes = 64 << 10
    """Least rate of a mirror over ``fetch_timeout_s``.

    From a slower one the device switches to the broker and keeps its bytes.
    """

    mirror_pause_s: Seconds = 10.0
    """Time for which a device avoids a mirror that failed. It doubles with each failure in a row, up to 64 times."""

    announcement_bytes: Bytes = 128 * 1024
    """Largest announcement sent as one message; the strictest hosted broker accepts no larger one. The offers of a larger
    announcement move to a blob, which only devices that take part fetch."""

    max_blob_bytes: Bytes = 1 << 30
    """Largest blob a device accepts. The sizes come from a server that need not be trusted."""

    store_bytes: Bytes = 2 << 30
    """Size of the device's blob cache; the least recently used blobs leave first."""

    upload_window: Count = 16
    """Chunks of an update in flight before the device waits for the broker: bounds memory on slow links."""

    ack_timeout_s: Seconds = 20.0
    """Time that an update waits for the server's acknowledgement before it is sent again.

    It doubles each time, up to 16 times.
    """

    checkpoint_steps: Count = 5
    """Local steps between two checkpoints of the training state: a power cut costs at most this many steps."""

    keepalive_s: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 20
    """MQTT keep-alive. The broker reports a dead device after 1.5 times this."""

    reconnect_min_s: Seconds = 0.2
    """First pause before reconnecting; doubled up to the maximum, and each cut by up to half at random
    so that a fleet does not stampede."""

    reconnect_max_s: Seconds = 10.0
    """Longest pause before reconnecting."""

    max_inflight: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 64
    """QoS 1 messages on their way at once. paho's default of 20 leaves fast links idle."""

    max_update_bytes: Bytes = 900 << 20
    """Largest update the server assembles, whatever its tier may send: SQLite takes values of 1,000,000,000 bytes."""

    max_pending_bytes: Bytes = 4 << 30
    """Bytes of unfinished updates the server holds over all devices before it drops the oldest; never more than a quarter of
    the machine's memory."""

    asked_bytes: Bytes = 24 << 20
    """Bytes of updates that are uploaded at the same time. If the updates of a round exceed it, the server asks devices in
    turn."""

    progress_messages_s: Rate = 100.0
    """Messages of progress per second that the server reads, of all devices together. It asks devices to send no more."""

    update_copies: Count = 8
    """Times that a device may send its update within a round: links break, and the server requests chunks again. The
    server drops further copies unread."""

    inbox_messages: Count = 20_000
    """Messages in the inbox of a process, on either side. At this number the network thread waits for room, and after a
    timeout drops messages."""

    inbox_bytes: Bytes = 128 << 20
    """Bytes of messages in the inbox of a process."""

    max_message_bytes: Bytes = 4 << 20
    """Largest message that either side reads, or the size of its own chunks and announcements if that is more. It
    disconnects from a broker that sends a larger one, before it buffers any of it."""

    max_devices: Count = 100_000
    """Most names of devices that the server stores. Every client that may write to the broker can invent names."""

    come_later_s: Seconds = 60.0
    """Least pause of a device that the server has no room for. The pause is random, up to twice this value.

    It grows with the number of such devices.
    """

    max_strangers: Count = 10_000
    """Most device names for which the server stores an online status without having a hello of the device."""

    hello_bytes: Annotated[int, msgspec.Meta(ge=256, le=1 << 20)] = 8192
    """Largest hello that the server reads; it keeps the last one of each device."""

    device_messages_s: Rate = 20.0
    """Messages a second of one device that the server reads, not counting chunks of its update.

    Bursts of ten times as many pass.
    """

    stranger_messages_s: Rate = 10.0
    """Messages per second that the server answers to devices without a hello, all of them together."""

    strikes: Count = 3
    """Rounds in a row that a device may spoil before the server suspends it for some rounds. A device spoils a round if it
    is online and silent until the deadline, or if its update is rejected."""

    bench_rounds: Count = 8
    """Rounds for which such a device is not selected, as long as enough other devices are available."""

    round_deadline_s: Seconds = 120.0
    """Longest time that a round stays open. Then it closes with the updates that have arrived."""

    offline_grace_s: Pause = 30.0
    """Time after a device's disconnection for which the server still selects it, because links break for moments."""

    ready_timeout_s: Pause = 120.0
    """Time that the server waits for ``min_devices`` before the first round."""

    conditions_s: Seconds = 60.0
    """Interval at which a device checks its conditions: power, link, heat, rules of its owner. If they changed, it sends a
    hello, and so at most once per interval."""

    retry_pause_s: Pause = 1.0
    """Pause of a device after a failed attempt at a round, before it tries again."""

    notice_s: Seconds = 5.0
    """Time without messages before a search for other clients of the broker starts. It doubles with each search.

    A device searches if it finds no federation, a server if it lacks devices. At the same intervals a server names the
    devices that its round waits for.
    """

    history_rounds: Count = 1000
    """Past rounds that a device remembers. It needs at least one, to recognize a task that it has already done."""

    max_manifest_bytes: Bytes = 16 << 20
    """Largest manifest that a device reads, and largest page of an announcement. Both are read before their content is
    verified."""

    max_steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1_000_000
    """Most local steps of a round. A device declines a round with more."""

    max_step_s: Seconds = 600.0
    """Longest local step. A device that needs longer declines the round. If its engine runs in a process of its own, that
    process is stopped."""

    max_round_s: Seconds = 86_400.0
    """Longest time that a device works on one round, pauses between steps included."""

    attempts: Count = 10
    """Times that a device starts a round whose work crashed its process, or its engine's, before it declines."""

    profile_s: Seconds = 900.0
    """Longest time that a device spends on measuring a bundle, whatever the request asks for."""

    profile_repeat: Count = 200
    """Most repetitions of a graph that a device measures."""

    profiles_an_hour: Count = 20
    """Profile requests that a device accepts within an hour."""

    @property
    def readable_bytes(self) -> int:
        """Size of the largest message that either side reads."""
        return max(self.max_message_bytes, self.chunk_bytes, self.announcement_bytes)

    def oversized(self) -> list[str]:
        """Return one line for each message size of this server that is larger than its devices read. Empty if there is
        none.
        """
        most = max(self.max_message_bytes, Limits().max_message_bytes)
        sizes = {"chunk_bytes": self.chunk_bytes, "announcement_bytes": self.announcement_bytes}
        return [
            f"limits.{name}: expected {most} at most, the largest message that devices read, found {size}; set it lower, or "
            "raise limits.max_message_bytes here and on each device"
            for name, size in sizes.items()
            if size > most
        ]


SEED_MAX = 2**63 - 1
"""Largest seed: the largest integer of a TOML file. torch's generators accept one bit more, for numbers derived from a
seed."""


def check_seed(seed: int) -> int:
    """Return ``seed`` unchanged.

    Raises:
        ConfigError: ``seed`` is not between 0 and :data:`SEED_MAX`.
    """
    if not 0 <= seed <= SEED_MAX:
        raise ConfigError(
            f"seed: expected a number from 0 to {SEED_MAX} (2**63 - 1), found {seed}; choose another",
            seed=seed,
        )
    return seed

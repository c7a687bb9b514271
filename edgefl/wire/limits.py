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
    """Sizes in bytes, times in seconds. Set them in the ``[limits]`` table of a federation file."""

    chunk_bytes: Annotated[int, msgspec.Meta(ge=256, le=MOST_CHUNK_BYTES)] = 128 * 1024
    """Payload of one MQTT message. 128 KiB is what the strictest hosted broker accepts; less than 256 bytes would
    leave no room for the fields around the data."""

    fetch_window: Count = 8
    """Chunks a device subscribes to at a time: 1 MiB in flight fills a link and stays far below the
    1,000 messages after which Mosquitto drops a client's queue."""

    fetch_timeout_s: Seconds = 10.0
    """Time a device waits for any chunk of its window before it subscribes again."""

    fetch_retries: Count = 5
    """Attempts without a single valid chunk before a blob is given up: a damaged or missing blob must not keep a device
    awake.
    """

    mirror_bytes_s: Bytes = 64 << 10
    """Least rate of a mirror over ``fetch_timeout_s``.

    From a slower one the device switches to the broker and keeps its bytes.
    """

    mirror_pause_s: Seconds = 10.0
    """Time for which a device avoids a mirror that failed. It doubles with each failure in a row, up to 64 times."""

    announcement_bytes: Bytes = 128 * 1024
    """Largest announcement that is one message: every device gets it, and the strictest hosted broker takes no more. What a
    larger one offers becomes a blob, for devices that take part."""

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
    """Bytes of updates that a server has on their way at a time. Where those of a round are more, devices take turns."""

    progress_messages_s: Rate = 100.0
    """Messages of progress a second that a server reads, of all devices together. It asks them to send no more."""

    update_copies: Count = 8
    """Times that a device may send its update within a round: links break, and the server requests chunks again. The server
    drops further copies unread.
    """

    inbox_messages: Count = 20_000
    """Messages that wait for the process on either side. The network thread waits while there are more, and drops what finds
    no room for a while."""

    inbox_bytes: Bytes = 128 << 20
    """Bytes of these messages."""

    max_message_bytes: Bytes = 4 << 20
    """Largest message that either side reads, or the size of its own chunks and announcements if that is more. At a larger
    one it hangs up, before it holds any of it."""

    max_devices: Count = 100_000
    """Most names of devices that the server stores. Every client that may write to the broker can invent names."""

    come_later_s: Seconds = 60.0
    """Least pause of a device that the server has no room for, and up to twice as long at random.

    It grows with the number of such devices.
    """

    max_strangers: Count = 10_000
    """Most names without a hello for which the server stores whether they are online."""

    hello_bytes: Annotated[int, msgspec.Meta(ge=256, le=1 << 20)] = 8192
    """Largest hello that the server reads; it keeps the last one of each device."""

    device_messages_s: Rate = 20.0
    """Messages a second of one device that the server reads, not counting chunks of its update.

    Bursts of ten times as many pass.
    """

    stranger_messages_s: Rate = 10.0
    """Messages a second that the server answers of names that said no hello, of all of them together."""

    strikes: Count = 3
    """Rounds in a row that a device spoils (it is online and silent until the deadline, or its update is refused) before the
    server leaves it out for a while."""

    bench_rounds: Count = 8
    """Rounds that such a device is left out, as long as there are enough others."""

    round_deadline_s: Seconds = 120.0
    """After this a round closes with the reports it has."""

    offline_grace_s: Pause = 30.0
    """A device that went offline less than this ago is still selected: links blink."""

    ready_timeout_s: Pause = 120.0
    """How long the server waits for ``min_devices`` before the first round."""

    conditions_s: Seconds = 60.0
    """How often a device looks in what conditions it is (power, link, heat, its owner's rules); where they are others than
    before it says hello again, so no more often."""

    retry_pause_s: Pause = 1.0
    """Pause of a device after a failed attempt at a round, before it tries again."""

    notice_s: Seconds = 5.0
    """Time without news before a search starts.

    A device without its federation, and a server that lacks devices, look for other clients of the broker. A server names
    the devices that its round waits for. It doubles each time.
    """

    history_rounds: Count = 1000
    """Past rounds a device remembers. At least one: by it the device knows that a task is done."""

    max_manifest_bytes: Bytes = 16 << 20
    """Largest manifest a device reads, and largest page of an announcement: they are read before anything that they say is
    known."""

    max_steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] = 1_000_000
    """Most local steps of a round that a device begins."""

    max_step_s: Seconds = 600.0
    """Longest local step. A device that needs longer declines; where its engine has a process of its own, that one is
    ended."""

    max_round_s: Seconds = 86_400.0
    """Longest time that a device works on one round, pauses between steps included."""

    attempts: Count = 10
    """Times that a device begins a round whose work ended its process, or its engine's, before it declines."""

    profile_s: Seconds = 900.0
    """Longest time that a device measures a bundle, whatever it is asked for."""

    profile_repeat: Count = 200
    """Most repetitions of a graph that a device measures."""

    profiles_an_hour: Count = 20
    """Requests for a profile that a device takes within an hour."""

    @property
    def readable_bytes(self) -> int:
        """Size of the largest message that either side reads."""
        return max(self.max_message_bytes, self.chunk_bytes, self.announcement_bytes)

    def unreadable(self) -> list[str]:
        """Return one line for each kind of message of this server that is larger than its devices read."""
        most = max(self.max_message_bytes, Limits().max_message_bytes)
        sizes = {"chunk_bytes": self.chunk_bytes, "announcement_bytes": self.announcement_bytes}
        return [
            f"limits.{name}: expected {most} at most, the largest message that devices read, found {size}; set it lower, or "
            "raise limits.max_message_bytes here and on each device"
            for name, size in sizes.items()
            if size > most
        ]


SEED_MAX = 2**63 - 1
"""Largest seed: the largest integer of a TOML file. torch's generators take one bit more, for numbers that follow a seed."""


def checked_seed(seed: int) -> int:
    """Return ``seed``. Raises ConfigError if it is not between 0 and :data:`SEED_MAX`."""
    if not 0 <= seed <= SEED_MAX:
        raise ConfigError(
            f"seed: expected a number from 0 to {SEED_MAX} (2**63 - 1), found {seed}; choose another",
            seed=seed,
        )
    return seed

"""``edgefl bench mirror``: a large model by the broker and by a mirror."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from edgefl.cli.bench.report import measured, mebibytes, report
from edgefl.cli.options import parse_bytes

if TYPE_CHECKING:
    from edgefl.bench.mirror.rows import MirrorRow

Way = StrEnum("Way", ["broker", "mirror"])


def mirror(
    nbytes: Annotated[str, typer.Option("--bytes", help="of the model, like 2GiB")] = "256MiB",
    unit: Annotated[str, typer.Option(help="of each unit of it")] = "64MiB",
    way: Annotated[list[Way] | None, typer.Option(help="may be repeated; default: both")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")] = False,
) -> None:
    """A model of random bytes, from the server's publisher to a device's store: by the broker, and by a mirror.

    A real Mosquitto, and each side a process of its own. seconds: of the device, from the announcement to the last byte,
    each checked against its digest. Peaks are resident sets of whole processes. Needs twice the bytes on the disk, and for
    the broker's way twice in memory: its retained messages, and the server's blobs.

    Examples:

      edgefl bench mirror --bytes 2GiB --json

      edgefl bench mirror --bytes 256MiB --way mirror
    """

    from edgefl.bench.mirror.rows import measure

    total, unit_bytes = parse_bytes(nbytes, "--bytes"), parse_bytes(unit, "--unit")
    ways = [cast(Literal["broker", "mirror"], each.value) for each in way or Way]
    rows, failed = measured(ways, lambda name, _: measure(name, total, unit_bytes), _line)
    report("mirror", f"{nbytes} in units of {unit}", rows, _columns, as_json, failed)


def _line(row: MirrorRow) -> str:
    return f"{row.way}: {row.seconds:g} s, {row.bytes / row.seconds / 1e6:.0f} MB/s"


def _columns(row: MirrorRow) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    return {
        "way": row.way,
        "publish s": row.publish_s,
        "fetch s": row.seconds,
        "device MiB": mebibytes(row.device_peak_bytes),
        "server MiB": mebibytes(row.server_peak_bytes),
        "broker MiB": mebibytes(row.broker_peak_bytes),
        "mirror MiB": mebibytes(row.mirror_peak_bytes),
        "page KB": f"{row.page_bytes / 1e3:.0f}",
    }

"""Queries on the journal's table of devices. They run in a transaction of :mod:`edgefl_server.storage.journal`."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from edgefl.errors import ProtocolError
from edgefl.wire.mqtt.messages import UNKNOWN_CONDITIONS, Conditions, Hello, decode, known_conditions
from edgefl_server.coordinator.roster import RosterEntry
from edgefl_server.storage import tables

_FEW = 500
"""Largest number of names in one statement, because databases have a limit."""


def save(
    connection: Connection, federation: str, devices: Iterable[tuple[RosterEntry, bytes | None]]
) -> None:
    """Insert or update the rows of ``devices``, which are pairs (device, its encoded hello message).

    A hello of None keeps the stored one.
    """
    table, new = tables.devices, {device.name: (device, hello) for device, hello in devices}
    ours = table.c.federation == federation
    among = ours & table.c.device.in_(list(new)) if len(new) <= _FEW else ours
    known = set(connection.execute(sa.select(table.c.device).where(among)).scalars())
    rows = [
        {**_device_row(device), "hello": hello or b"", "federation": federation, "device": name}
        for name, (device, hello) in new.items()
        if name not in known
    ]
    if rows:
        connection.execute(table.insert(), rows)
    key = ours & (table.c.device == sa.bindparam("name"))
    changes = [(device, hello) for name, (device, hello) in new.items() if name in known]
    for greeted in (True, False):  # one statement for many rows has one set of columns
        many = [
            {"name": device.name, **_device_row(device), **({"hello": hello} if greeted else {})}
            for device, hello in changes
            if (hello is not None) == greeted
        ]
        if many:
            connection.execute(table.update().where(key), many)


def devices(connection: Connection, federation: str) -> dict[str, RosterEntry]:
    """Return the stored devices of a federation by name. Their exclusion by conditions (``unfit``) is not stored."""
    query = sa.select(tables.devices).where(tables.devices.c.federation == federation)
    return {
        row["device"]: RosterEntry(
            row["device"],
            row["tier"],
            row["samples"],
            row["online"],
            row["last_seen"],
            _conditions(row["hello"]),
        )
        for row in connection.execute(query).mappings().all()
    }


def count(connection: Connection, federation: str) -> int:
    """Return the number of a federation's stored devices that have a tier."""
    columns = tables.devices.c
    query = sa.select(sa.func.count()).where((columns.federation == federation) & (columns.tier != ""))
    return int(connection.execute(query).scalar_one())


def _conditions(hello: bytes) -> Conditions:
    """Return the power, link and thermal conditions in a stored hello message.

    They are unknown if it is missing or invalid, such as one of an earlier release.
    """
    try:
        conditions = decode(Hello, hello).conditions if hello else UNKNOWN_CONDITIONS
    except ProtocolError:
        return UNKNOWN_CONDITIONS
    return known_conditions(conditions) if isinstance(conditions, Conditions) else UNKNOWN_CONDITIONS


def _device_row(device: RosterEntry) -> dict[str, object]:
    return {"tier": device.tier, "samples": device.samples, "online": device.online, "last_seen": device.seen}

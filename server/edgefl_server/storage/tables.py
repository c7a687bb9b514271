"""Tables of the journal, and connections to its database."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from edgefl.errors import StoreError
from edgefl.system.files import make_private
from edgefl_server.coordinator.states import MOST_REASON

_BLOB = sa.LargeBinary(length=2**32 - 1)
_tables = sa.MetaData()

runs = sa.Table(
    "runs",
    _tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("federation", sa.String(64), nullable=False, index=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
)
devices = sa.Table(
    "devices",
    _tables,
    sa.Column("federation", sa.String(64), primary_key=True),
    sa.Column("device", sa.String(64), primary_key=True),
    sa.Column("hello", _BLOB, nullable=False),
    sa.Column("tier", sa.String(64), nullable=False),
    sa.Column("samples", sa.BigInteger, nullable=False),
    sa.Column("online", sa.Boolean, nullable=False),
    sa.Column("last_seen", sa.Float, nullable=False),
)
rounds = sa.Table(
    "rounds",
    _tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("model_version", sa.String(64), nullable=False),
    sa.Column("opened", sa.Float, nullable=False),
    sa.Column("deadline", sa.Float, nullable=False),
    sa.Column("goal", sa.Integer, nullable=False),
    sa.Column("units", _BLOB, nullable=False),
    sa.Column("outcome", sa.JSON, nullable=False),
    sa.Column("whole", sa.Boolean, nullable=False),
    sa.Column("restart", sa.Boolean, nullable=False, default=False),
    sa.Column("weight_cap", sa.BigInteger, nullable=False, default=0),  # 0: it waits for its devices
)
assignments = sa.Table(
    "assignments",
    _tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("device", sa.String(64), primary_key=True),
    sa.Column("tier", sa.String(64), nullable=False),
    sa.Column("seed", sa.String(20), nullable=False),  # text: some databases have no unsigned 64 bits
    sa.Column("nonce", sa.String(64), primary_key=True),
    sa.Column("weight_limit", sa.BigInteger, nullable=False),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("reason", sa.String(MOST_REASON), nullable=False),
)
participations = sa.Table(
    "participations",
    _tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("device", sa.String(64), primary_key=True),
    sa.Column("tasks", sa.Integer, nullable=False),
    sa.Column("reports", sa.Integer, nullable=False),
    sa.Column("last", sa.Integer, nullable=False),
)
updates = sa.Table(
    "updates",
    _tables,
    sa.Column("run", sa.String(64), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("device", sa.String(64), primary_key=True),
    sa.Column("nonce", sa.String(64), primary_key=True),
    sa.Column("sha256", sa.String(64), primary_key=True),
    sa.Column("step", sa.Integer, nullable=False),  # the round that took it; `round` is the round of its task
    sa.Column("share", sa.Float, nullable=False, default=1.0),  # of its change that counts
    sa.Column("reason", sa.String(32), nullable=False),  # empty: accepted
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("weight", sa.BigInteger, nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("train_ms", sa.Float, nullable=False),
    sa.Column("down_bytes", sa.BigInteger, nullable=False),
    sa.Column("up_bytes", sa.BigInteger, nullable=False),
    sa.Column("down_wire_bytes", sa.BigInteger, nullable=False),
    sa.Column("up_wire_bytes", sa.BigInteger, nullable=False),
    sa.Column("up_float32_bytes", sa.BigInteger, nullable=False),
    sa.Column(
        "shard", sa.Integer, nullable=False
    ),  # whose process took it; edgefl.wire.mqtt.topics.NO_SHARD: the server's
    sa.Column("file", sa.String(255), nullable=False),  # of an accepted one, and where in it
    sa.Column("offset", sa.BigInteger, nullable=False),  # ascending as they came
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Index("updates_of_step", "run", "step"),
)
SIZES = ("down_bytes", "up_bytes", "down_wire_bytes", "up_wire_bytes", "up_float32_bytes")


LAYOUT = 5
"""Version of the tables and their contents. A journal with another number was written by another release."""
layout = sa.Table(
    "journal_layout", _tables, sa.Column("number", sa.Integer, primary_key=True, autoincrement=False)
)


_CONNECT_S = 10
"""Seconds to wait for the answer of a remote database."""


def engine(url: str) -> sa.Engine:
    """Return an SQLAlchemy engine for the journal at ``url``. Nothing is connected yet.

    Raises:
        StoreError: If the URL is invalid or its driver is not installed.
    """
    try:
        if url.startswith("sqlite"):
            made = sa.create_engine(url)
            if made.url.database not in (None, "", ":memory:"):
                with suppress(OSError):  # SQLite says what is wrong with the place
                    make_private(Path(str(made.url.database)))
            sa.event.listen(made, "connect", use_write_ahead_log)
            return made
        postgres = url.startswith("postgresql")
        options = {"connect_timeout": _CONNECT_S, "client_encoding": "utf8"} if postgres else {}
        # A connection that a restart of the database cut is noticed before it is used.
        return sa.create_engine(url, connect_args=options, pool_pre_ping=True)
    except ImportError as error:
        raise StoreError(
            f"the journal is to be at {url.partition(':')[0]}, whose driver is not installed ({error}): "
            "`pip install edgefl-tiers[postgres]`, or leave out `database`"
        ) from error
    except sa.exc.ArgumentError as error:
        raise StoreError(f"the journal's database is no SQLAlchemy URL: {error}") from error


def create(engine: sa.Engine) -> None:
    """Create the journal's tables if the database has none of them, else check their layout.

    Raises:
        StoreError: If the existing tables have another layout.
    """
    names = set(sa.inspect(engine).get_table_names())
    with engine.begin() as connection:
        if not names & set(_tables.tables):
            if engine.dialect.name == "sqlite":
                # Python's driver begins no transaction for CREATE: a full disk or a kill would leave some of the tables.
                connection.exec_driver_sql("BEGIN")
            _tables.create_all(connection)
            connection.execute(layout.insert().values(number=LAYOUT))
            return
        number = connection.execute(sa.select(layout.c.number)).scalar() if layout.name in names else 0
    if number != LAYOUT:
        raise StoreError(
            f"the journal at {engine.url!s} has layout {number}, this server reads {LAYOUT}: use the edgefl that "
            "wrote it, or choose another folder",
            url=str(engine.url),
            layout=number,
        )


def use_write_ahead_log(connection: Any, _record: object) -> None:
    """Set up an SQLite connection: write-ahead log, durable commits, and writers that wait for each other."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA busy_timeout=30000")
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()

"""How a bench tells its rows."""

from __future__ import annotations

from typing import Any

from edgefl.cli.output import print_json, print_table


def print_rows(name: str, rows: list[Any], as_json: bool) -> None:
    import msgspec

    from edgefl.bench.common.machine import machine

    plain = [msgspec.to_builtins(row) for row in rows]
    if as_json:
        print_json({"bench": name, "machine": machine(), "results": plain})
    else:
        print_table(name, plain)


def mebibytes(count: int | None) -> str:
    """For a column; ``-`` where nothing was measured."""
    from edgefl.system.sizes import mib

    return "-" if count is None else mib(count)

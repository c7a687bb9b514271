"""Federation files: one TOML file describes a federation, and these types check and document each of its keys.

>>> load(Path("federation.toml"), {"federation.rounds": 3})
"""

from __future__ import annotations

from edgefl.config.federation import Federation, without_devices
from edgefl.config.reading import checked, load, parse
from edgefl.config.rounds import AggregateTable, DownlinkTable, RoundTable, SelectionTable
from edgefl.config.tables import (
    AlgorithmTable,
    BrokerTable,
    DataTable,
    ExportTable,
    TierTable,
    TrackingTable,
)

__all__ = [
    "AggregateTable",
    "AlgorithmTable",
    "BrokerTable",
    "DataTable",
    "DownlinkTable",
    "ExportTable",
    "Federation",
    "RoundTable",
    "SelectionTable",
    "TierTable",
    "TrackingTable",
    "checked",
    "load",
    "parse",
    "without_devices",
]

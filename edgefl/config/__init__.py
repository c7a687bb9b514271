"""One TOML file describes a federation; this is that file as types, with every key documented and checked.

>>> load(Path("federation.toml"), {"federation.rounds": 3})
"""

from __future__ import annotations

from edgefl.config.federation import Federation, without_devices
from edgefl.config.reading import checked, load, parse
from edgefl.config.tables import AlgorithmTable, DataTable, TierTable

__all__ = [
    "AlgorithmTable",
    "DataTable",
    "Federation",
    "TierTable",
    "checked",
    "load",
    "parse",
    "without_devices",
]

"""Dashboard of a fleet: reads the folder of a run and shows it. It is a process of its own, so killing it does not
affect the run. :mod:`edgefl_server.dashboard.state` reads, :mod:`edgefl_server.dashboard.views` renders tables and
pages, and :mod:`edgefl_server.dashboard.web` serves them.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("monitoring")
GRAFANA = _FOLDER / "grafana.json"
"""A Grafana dashboard over the metrics of Prometheus."""
ALERTS = _FOLDER / "alerts.yml"
"""Alert rules for Prometheus."""

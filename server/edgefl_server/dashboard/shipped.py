"""Files for other programs that come with the package."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("monitoring")
GRAFANA = _FOLDER / "grafana.json"
"""A Grafana dashboard over the metrics of Prometheus."""
ALERTS = _FOLDER / "alerts.yml"
"""Alert rules for Prometheus."""

"""What Prometheus reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from edgefl_server.dashboard import ALERTS, GRAFANA
from tests.server.dashboard.served import PageProcess
from tests.support.commands import run_python


def samples(page: PageProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    """By name, and by the values of its labels but the federation's."""
    return {
        (
            sample.name,
            tuple(value for key, value in sorted(sample.labels.items()) if key != "federation"),
        ): sample.value
        for family in text_string_to_metric_families(page.get("/metrics").text)
        for sample in family.samples
    }


def test_prometheus_reads_the_fleet(page: PageProcess) -> None:
    found = samples(page)

    rounds = page.get("/api/rounds.json").json
    assert found["edgefl_round", ()] == 3 and found["edgefl_rounds_total", ("closed",)] == 3
    assert found["edgefl_updates_total", ("arrived",)] == sum(row["arrived"] for row in rounds)
    assert found["edgefl_phase", ("waiting",)] == 1 and found["edgefl_phase", ("done",)] == 0
    assert found["edgefl_devices", ("idle", "strong")] == 20
    assert found["edgefl_server_cpu_seconds_total", ()] == 9.0
    assert page.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_number_of_metrics_does_not_grow_with_the_fleet(page: PageProcess) -> None:
    assert len(samples(page)) < 100


def test_the_command_prints_both_files() -> None:
    for flag, file in (("--grafana", GRAFANA), ("--alerts", ALERTS)):
        assert run_python("-m", "edgefl", "dashboard", flag, check=True).stdout == file.read_text()

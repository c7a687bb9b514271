"""What `edgefl device` makes of its options."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgefl.cli import app
from edgefl.cli.options import parse_bytes
from edgefl.errors import ConfigError
from edgefl.wire import folders
from edgefl_device.agent import DeviceAgent
from edgefl_device.round.autotune import Autotuner, ProcessorTable
from tests.cli.runner import runner
from tests.device_runtime.agent.scripted import write_data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12B", 12),
        ("64M", 64 << 20),
        ("64K", 64 << 10),
        ("1g", 1 << 30),
        ("1.5 MiB", 3 << 19),
        ("2KB", 2000),
        ("7B", 7),
    ],
)
def test_sizes_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "-1", "-2MiB", "1e400", "", "MB", "5X", "1e99GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory: .* is not a size"):
        parse_bytes(text, "--memory")


def test_a_number_without_a_unit_is_no_memory() -> None:
    with pytest.raises(ConfigError, match="--memory: '64' has no unit; write 64MiB, or 64B for bytes"):
        parse_bytes("64", "--memory")


def test_two_federations_of_one_device_have_two_stores() -> None:
    assert folders.store("demo", "phone") == Path.home() / ".edgefl" / "demo" / "phone"


@pytest.mark.parametrize(
    ("option", "tuner"), [((), ProcessorTable), (("--tune",), Autotuner), (("--no-tune",), type(None))]
)
def test_only_tune_measures_and_the_default_takes_the_processors_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: tuple[str, ...], tuner: type
) -> None:
    tuners: list[object] = []

    def run(agent: DeviceAgent) -> None:
        tuners.append(agent.rounds.executor.tuner)
        agent.store.close()

    monkeypatch.setattr(DeviceAgent, "run", run)
    data = write_data(tmp_path)
    arguments = [
        "device",
        "--id",
        "d",
        "--data",
        str(data),
        "--store",
        str(tmp_path / "s"),
        "--sandbox",
        "never",
    ]
    ran = runner().invoke(app, [*arguments, *option])

    assert ran.exit_code == 0, ran.output
    assert [type(each) for each in tuners] == [tuner]

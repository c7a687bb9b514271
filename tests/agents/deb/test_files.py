"""Files of the Debian package, as far as they can be read without building it."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from tests.agents.deb.debian_root import FILES, ROOT, read_unit

OPTIONS = set(re.findall(r'"--([a-z-]+)[",]', (ROOT / "agents/cpp/src/cli/options.cpp").read_text()))


def test_the_unit_confines_and_watches_the_agent() -> None:
    unit = read_unit((FILES / "edgefl-agent.service").read_text())
    service = {name: values[-1] for name, values in unit["Service"].items()}

    assert service["Type"] == "notify"
    assert service["User"] == "edgefl-agent"
    assert service["ProtectSystem"] == "strict"
    assert service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == ""
    assert service["StateDirectory"] == "edgefl-agent"
    assert service["Restart"] == "on-failure"
    assert {"MemoryMax", "WatchdogSec", "RestartSec"} <= service.keys()
    assert unit["Unit"]["StartLimitIntervalSec"] == ["0"]


def test_a_purge_removes_nothing_of_another_unit() -> None:
    """A server or a Python device on the same machine keeps its key and its run."""
    script = (FILES / "postrm").read_text()
    removed = [path for line in re.findall(r"rm -rf (.+)", script) for path in line.split()]
    own = read_unit((FILES / "edgefl-agent.service").read_text())["Service"]
    units = sorted((ROOT / "examples" / "fleet").glob("*.service"))

    assert f"/var/lib/{own['StateDirectory'][-1]}" in removed
    assert len(units) == 2
    for unit in units:
        text = unit.read_text()
        service = read_unit(text)["Service"]
        used = set(re.findall(r"(?<=[ =])/[\w./-]+", text))
        used |= {f"/var/lib/{name}" for name in service["StateDirectory"]}
        used |= {f"/var/cache/{name}" for name in service.get("CacheDirectory", ())}
        assert service["User"] != own["User"]
        lost = {path for path in used for each in removed if path == each or path.startswith(f"{each}/")}
        assert lost == set(), unit.name


@pytest.mark.parametrize("commented", [False, True])
def test_the_configuration_has_the_agent_s_options_only(*, commented: bool) -> None:
    text = (FILES / "agent.toml").read_text()
    if commented:
        text = re.sub(r"(?m)^#(?=[a-z-]+ = )", "", text)
    keys = tomllib.loads(text).keys()

    assert keys <= OPTIONS
    assert ({"id", "data", "broker", "federation"} <= keys) == commented


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts_are_shell(name: str) -> None:
    script = FILES / name

    subprocess.run(["sh", "-n", script], check=True)
    assert script.read_text().startswith("#!/bin/sh\nset -e\n")
    assert script.stat().st_mode & 0o777 == 0o755


def test_files_below_etc_are_conffiles() -> None:
    installed = re.findall(r"/agent\.toml DESTINATION (/etc/\S+)", (FILES / "package.cmake").read_text())

    assert (FILES / "conffiles").read_text().split() == [f"{folder}/agent.toml" for folder in installed]

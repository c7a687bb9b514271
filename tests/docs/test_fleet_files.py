"""The files of `examples/fleet`: a broker with these access rules, and units that systemd takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgefl.wire.mqtt.address import Address
from edgefl.wire.mqtt.events import IncomingMessage
from edgefl.wire.mqtt.topics import Topics
from tests import needs
from tests.conftest import Mosquitto, SessionFactory
from tests.docs.documents import ROOT
from tests.docs.test_commands import unknown
from tests.wire.mqtt.events import wait_for, wait_message, wait_up

FLEET = ROOT / "examples" / "fleet"
UNITS = sorted(FLEET.glob("*.service"))


class Guarded(Mosquitto):
    """Mosquitto with the example's configuration, but for the certificates and the place of the files."""

    def _command(self) -> list[str]:
        algorithm, *_ = super()._command()
        config = self._folder / f"mosquitto-{self.port}.conf"
        own = [line for line in config.read_text().splitlines() if line.startswith(("listener", "user"))]
        shown = (FLEET / "mosquitto.conf").read_text().replace("/etc/mosquitto", str(self._folder))
        kept = [
            line for line in shown.splitlines() if not re.match("listener|cafile|certfile|keyfile|#", line)
        ]
        config.write_text("\n".join([*own, *kept]) + "\n")
        return [algorithm, "-c", str(config)]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Address]:
    maker = needs.require("mosquitto_passwd")
    passwords = tmp_path / "edgefl.passwd"
    passwords.touch(mode=0o600)
    for user in ("server", "pi-1", "pi-2"):
        subprocess.run([maker, "-b", str(passwords), user, f"pw-{user}"], check=True)
    shutil.copy(FLEET / "edgefl.acl", tmp_path)
    broker = Guarded(tmp_path)
    broker.start()
    yield broker.address
    broker.stop()


def test_a_device_speaks_under_its_own_name(guarded: Address, connect: SessionFactory) -> None:
    def user(name: str) -> Address:
        return replace(guarded, username=name, password=f"pw-{name}")

    topics = Topics("orchard")
    one, other = topics.device("pi-1"), topics.device("pi-2")
    server, device = connect(user("server")), connect(user("pi-1"))
    for session in (server, device):
        wait_up(session)
    server.subscribe(topics.server_filters)
    device.subscribe([topics.current_round, one.tasks, other.tasks])
    server.publish(topics.current_round, b"round", retain=True)
    assert wait_message(device, topics.current_round) == b"round"

    server.publish(other.tasks, b"for the other")
    server.publish(one.tasks, b"for this one")
    assert wait_message(device, one.tasks) == b"for this one"

    for topic in (topics.current_round, other.hello, one.hello):
        device.publish(topic, b"from pi-1", retain=topic == topics.current_round)
    hello = wait_for(server, IncomingMessage, lambda event: event.topic.endswith("/hello"))
    assert (hello.topic, hello.payload) == (one.hello, b"from pi-1"), "what it says for another is dropped"
    late = connect(user("pi-2"))
    wait_up(late)
    late.subscribe([topics.current_round])
    assert wait_message(late, topics.current_round) == b"round", "a device announces no round"


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_start_commands_that_exist(unit: Path) -> None:
    [command] = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    algorithm, *words = shlex.split(command)
    assert algorithm == "/opt/edgefl/bin/edgefl" and list(unknown(words)) == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    verify = needs.require("systemd-analyze")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/edgefl/bin/edgefl", "/bin/true"))
    done = subprocess.run([verify, "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if unit.name in line]) == (0, [])

"""Mosquitto with TLS, users and an access list, as ``edgefl broker --tls`` runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edgefl.lab.broker import free_port
from edgefl.wire.mqtt.address import Address, read_secret
from edgefl_server.lab_broker import LabBroker
from tests import needs
from tests.conftest import BrokerProcess


class SecureBroker(BrokerProcess):
    """``lab`` says who may come; ``extra`` lines go to the configuration's end."""

    def __init__(
        self,
        folder: Path,
        *,
        devices: tuple[str, ...] = ("pi-1", "pi-2"),
        extra: str = "",
        certificates: bool = False,
    ) -> None:
        super().__init__(folder)
        self.websocket_port = free_port(other=self.port)
        self._extra = extra
        self.lab = LabBroker(
            folder=folder / "lab",
            federation="orchard",
            devices=devices,
            port=self.port,
            websocket_port=self.websocket_port,
            client_certificates=certificates,
        )

    def _command(self) -> list[str]:
        needs.require("mosquitto")
        command = self.lab.command()
        config = Path(command[-1])
        config.write_text(config.read_text() + self._extra)
        return command

    def user(self, name: str, **changes: object) -> Address:
        """How ``name`` comes, with its password or certificate."""
        needs = self.lab.needs(name)
        secret = read_secret(needs["password-file"]) if "password-file" in needs else ""
        return replace(replace(Address.parse(needs["broker"]), password=secret), **changes)  # type: ignore[arg-type]

"""Table of a federation file for its broker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edgefl.config.tables import ConfigTable
from edgefl.wire.mqtt.address import Address, ClientIds, Version, read_secret

BrokerProfileName = Literal["none", "aws"]


class BrokerTable(ConfigTable):
    """The MQTT broker and its address."""

    kind: Literal["amqtt", "mosquitto", "external"] = Field("amqtt", description="what `edgefl run` starts")
    host: str = Field("127.0.0.1", description="address of the broker")
    port: int = Field(0, ge=0, le=65535, description="port; 0 lets `edgefl run` pick a free one")
    username: str = Field("", description="user name, if the broker asks for one")
    password: str = Field("", description="password; better in password_file, or in EDGEFL_BROKER_PASSWORD")
    password_file: str = Field("", description="file whose first line is the password")
    insecure_password: bool = Field(False, description="the password may travel without TLS")
    tls: bool = Field(
        False, description="TLS, with a broker whose certificate the system's authorities signed"
    )
    ca_file: str = Field("", description="certificate of the broker's authority (PEM); switches TLS on")
    cert_file: str = Field("", description="client certificate (PEM), for mutual TLS")
    key_file: str = Field("", description="its key (PEM, without a password)")
    alpn: str = Field("", description="name of the protocol in TLS, for a port 443 that serves several")
    path: str = Field("", description="path of MQTT over WebSocket, like /mqtt")
    mqtt: Version = Field("auto", description="version; auto: 5 where the broker has it, else 3.1.1")
    client_ids: ClientIds = Field(
        "short",
        description="short: 23 letters that nobody can guess; full: readable, for a broker that binds them to users",
    )
    profile: BrokerProfileName = Field(
        "none", description="limits to keep to: those of a hosted broker (aws), or none"
    )

    def address(self, port: int = 0) -> Address:
        """Return the broker's address, with ``port`` if the table has none.

        Raises:
            BrokerError: the password file cannot be read.
        """
        return Address(
            self.host.removeprefix("[").removesuffix("]"),
            self.port or port or 1883,
            self.username,
            read_secret(self.password_file) if self.password_file else self.password,
            **{name: getattr(self, name) for name in REACHED_BY},
        )


REACHED_BY = (
    "ca_file",
    "cert_file",
    "key_file",
    "alpn",
    "tls",
    "path",
    "mqtt",
    "client_ids",
    "insecure_password",
)
"""Keys of ``[broker]`` that are fields of an address under the same name."""

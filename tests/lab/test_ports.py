"""Ports for brokers: free, and not of those that outgoing connections get."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from edgefl.errors import ConfigError
from edgefl.lab import broker
from edgefl.lab.broker import free_port

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_no_outgoing_connection_is_given_the_port_of_a_broker() -> None:
    first = int(EPHEMERAL.read_text().split()[0]) if EPHEMERAL.exists() else 49_152

    assert all(1024 < free_port() < first for _ in range(50))


def test_a_port_that_is_in_use_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(broker, "_PORTS", range(port, port + 1))
        monkeypatch.setattr(broker, "_TRIES", 1)

        with pytest.raises(ConfigError, match="is free"):
            free_port()

    assert free_port() == port


def test_runs_that_start_together_choose_different_ports() -> None:
    assert len({free_port() for _ in range(20)}) > 15

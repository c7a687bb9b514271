"""Certificates of a lab: they satisfy the strict verification that Python does from 3.13 on."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

from edgefl_server.access.certificates import LabAuthority


def test_a_strict_client_and_a_strict_broker_trust_each_other(tmp_path: Path) -> None:
    authority = LabAuthority(tmp_path)
    pairs = {"broker": authority.broker("localhost"), "pi-1": authority.client("pi-1")}
    pipes = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = []
    for name, purpose, read, write in (
        ("broker", ssl.Purpose.CLIENT_AUTH, *pipes),
        ("pi-1", ssl.Purpose.SERVER_AUTH, *reversed(pipes)),
    ):
        context = ssl.create_default_context(purpose, cafile=str(authority.own.certificate))
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_cert_chain(pairs[name].certificate, pairs[name].key)
        is_broker = name == "broker"
        host = None if is_broker else "localhost"
        ends.append(context.wrap_bio(read, write, server_side=is_broker, server_hostname=host))
    for _ in range(3):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()

    assert [end.getpeercert()["subject"][0][0][1] for end in ends] == ["pi-1", "localhost"]  # type: ignore[index]

"""The page as a process: it reads what is trained, writes the samples, and serves until it is told to end."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path

import uvicorn

from edgefl.config import Federation, load
from edgefl.data.dataset import Dataset
from edgefl.setup.data import open_data
from edgefl.web.app import application
from edgefl.web.built import built_page
from edgefl.web.offer import offer_of
from edgefl.web.relay import Relay
from edgefl.web.samples import write_samples
from edgefl.web.settings import WebSettings
from edgefl.wire.errors import ConfigError, EdgeflError
from edgefl.wire.mqtt.address import Address
from server.dashboard.web.serve import bind

_END_S = 3
_MOST_MESSAGE = 1 << 22
"""Bytes of a WebSocket message: a chunk of an update is 128 KiB."""


def serve(settings: WebSettings) -> None:
    """Until SIGTERM or SIGINT. ConfigError for what cannot be served."""
    static = built_page()
    check_certificate(settings.cert_file, settings.key_file)
    folder = Path(settings.folder)
    federation = load(folder / "federation.toml")
    relay = Relay(Address.parse(settings.relay)) if settings.relay else None
    dataset = _data(federation)
    samples = folder / "samples"
    rows = write_samples(samples, dataset, federation.federation.seed) if dataset is not None else 0
    keys = (settings.server_key,) if settings.server_key else ()
    offer = offer_of(
        federation, dataset, rows, broker=settings.broker, login=settings.login, server_keys=keys
    )
    served = application(
        offer, secret=settings.secret, url=settings.address, static=static, samples=samples, relay=relay
    )
    config = uvicorn.Config(
        served,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_END_S,
        ws_max_size=_MOST_MESSAGE,
        ws_per_message_deflate=False,  # weights are coded, and updates too
        http="h11",
        loop="asyncio",
        ssl_certfile=settings.cert_file or None,
        ssl_keyfile=settings.key_file or None,
    )
    uvicorn.Server(config).run(sockets=[bind(settings.host, settings.port)])


def _data(federation: Federation) -> Dataset | None:
    """What samples are drawn from, where this machine has it: a server whose devices have their own needs none."""
    try:
        return open_data(federation)
    except EdgeflError as error:
        sys.stderr.write(f"no sample for browsers: {error.message}\n")
        return None


def check_certificate(cert_file: str, key_file: str) -> None:
    """ConfigError for half a certificate, or one that cannot be used."""
    if bool(cert_file) != bool(key_file):
        raise ConfigError("a certificate and its key go together: name both (`web_cert`, `web_key`), or none")
    if not cert_file:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password=lambda: "")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the certificate {cert_file} with the key {key_file} cannot be used ({error}): name PEM files that belong "
            "together and can be read, the key without a password"
        ) from error

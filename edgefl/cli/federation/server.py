"""``edgefl server``: the server of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgefl.cli import options
from edgefl.cli.federation.web import Dashboard, Web, WebBroker, WebCertFile, WebKeyFile
from edgefl.cli.isolated import SettingsPipe
from edgefl.wire.mqtt.address import Address, read_secret


def server(
    ctx: typer.Context,
    config: Annotated[Path, typer.Option(help="federation file (TOML)")],
    out: Annotated[
        Path,
        typer.Option(
            callback=options.writable_folder,
            help="folder for journal, checkpoints, bundles and the trained model",
        ),
    ],
    broker: options.Broker = "",
    ca_file: options.CaFile = "",
    cert_file: options.CertFile = "",
    key_file: options.KeyFile = "",
    password_file: options.PasswordFile = "",
    insecure_password: options.InsecurePassword = False,
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            help="URL where devices find what this server publishes, like https://weights.example.org; may be repeated"
        ),
    ] = None,
    database: options.Database = "",
    processor: options.ProcessorOption = options.Processor.auto,
    sign_key: Annotated[
        Path | None,
        typer.Option(
            help="file with the server's key, which signs all it says; made if there is none; default: this user's for the "
            "federation"
        ),
    ] = None,
    enrolled: Annotated[
        Path | None,
        typer.Option(
            help="list of the devices that may join (`edgefl enroll`); default: the first key of each name may"
        ),
    ] = None,
    tensorboard: options.Tensorboard = False,
    mlflow: options.Mlflow = None,
    dashboard: Dashboard = "",
    web: Web = "",
    web_cert_file: WebCertFile = "",
    web_key_file: WebKeyFile = "",
    web_broker: WebBroker = "",
    workers: Annotated[
        int | None,
        typer.Option(help="processes that take updates; default: server.workers of the file", min=1),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="a Ray cluster on which they run; default: server.ray of the file"
        ),
    ] = None,
    updates: Annotated[
        str,
        typer.Option(
            help="where the bytes of updates go, a folder or an fsspec URL; default: server.updates of the file"
        ),
    ] = "",
    evaluate: Annotated[
        bool,
        typer.Option(
            "--evaluate",
            help="of a finished run: one more evaluation round, on the rows that devices hold out",
        ),
    ] = False,
    statistics: Annotated[str, typer.Option(hidden=True, help="of `edgefl statistics`: its request")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="events as JSON lines")] = False,
) -> None:
    """Run the server of a federation.

    It exports the tiers' bundles, opens rounds and averages what devices send.

    Kill it at any time and start it again with the same --out: it resumes the open round.

    Where the algorithm needs every device, round.absent says what becomes of a round that lacks one: "wait" tries it again
    when the device is back, "refuse" ends the server with exit code 13, "partial" continues with the others.
    Three tries in a row that end because updates are refused end it with exit code 13, too.

    Examples:

      edgefl server --config federation.toml --broker localhost:1883 --out runs/fleet

      edgefl server --config federation.toml --broker mqtts://server@broker.lan --ca-file ca.crt --out runs/fleet

      edgefl server --config federation.toml --web --web-cert-file page.crt --web-key-file page.key --out runs/fleet
    """

    from edgefl.cli.federation import serving
    from edgefl.config.reading import check_names

    if broker:
        Address.parse(broker)
    if password_file:
        read_secret(password_file)
    tracking: dict[str, bool | str] = {"tracking.tensorboard": tensorboard, "tracking.mlflow": mlflow or ""}
    early = check_names(config, {key: value for key, value in tracking.items() if value})
    early.tracking.check_packages()
    serving.say_start(config, out, as_json=as_json)
    own: dict[str, str | int] = {"workers": workers or 0, "ray": ray or "", "updates": updates}
    settings = serving.ServerSettings(
        config=str(config),
        out=str(out),
        broker=broker,
        given={
            **{f"server.{key}": value for key, value in own.items()},
            "broker.ca_file": ca_file,
            "broker.cert_file": cert_file,
            "broker.key_file": key_file,
            "broker.password_file": password_file,
            "broker.insecure_password": insecure_password,
            "downlink.mirrors": mirror or [],
            **tracking,
        },
        database=database,
        device=processor.value,
        sign_key=str(sign_key or ""),
        enrolled=str(enrolled or ""),
        dashboard=dashboard,
        web=(web, web_cert_file, web_key_file, web_broker),
        as_json=as_json,
        evaluate=evaluate,
        statistics=statistics,
    )
    if isinstance(ctx.obj, SettingsPipe):
        ctx.obj.send(settings)
    else:
        serving.run(settings, serving.load())

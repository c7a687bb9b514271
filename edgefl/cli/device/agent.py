"""``edgefl device``: run a device agent. Never imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from edgefl.cli import options
from edgefl.cli.device import personalize as device_personalize
from edgefl.cli.device import tune as device_tune
from edgefl.cli.isolated import SettingsPipe
from edgefl.wire import folders
from edgefl.wire.mirrors import Mirror
from edgefl.wire.mqtt.topics import checked_name

_EXAMPLES = """
Run a device agent. Needs no torch.

It takes tasks, trains on local data and sends updates.

Examples:

  edgefl device --id phone-7 --broker localhost:1883 --data my-data.npz

  edgefl device --id pi-3 --broker broker.lan --data /data/images --memory 256MiB --threads 4

  edgefl device --id pi-4 --broker broker.lan --data /data/images --engine executorch
"""


class _AgentOrCommand(TyperGroup):
    """Command group that runs the agent if no command is named; the options of the agent are required only then."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        needed = (
            [param for param in self.params if param.required] if args and args[0] in self.commands else []
        )
        try:
            for param in needed:
                param.required = False
            return super().parse_args(ctx, args)
        finally:
            for param in needed:
                param.required = True


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        cls=_AgentOrCommand, invoke_without_command=True, help=_EXAMPLES, rich_markup_mode="rich"
    )
    group.callback()(device)
    group.command("personalize")(device_personalize.personalize)
    group.command("build-engine")(device_tune.build_engine)
    app.add_typer(group, name="device")


def device(
    ctx: typer.Context,
    device_id: Annotated[str, typer.Option("--id", help="name of this device; stable over restarts")],
    data: options.LocalData,
    broker: options.Broker = "localhost:1883",
    federation: Annotated[str, typer.Option(help="name of the federation to join")] = "demo",
    store: Annotated[
        Path | None, typer.Option(help="folder for the device's store; default: ~/.edgefl/FEDERATION/ID")
    ] = None,
    bad_rows: options.BadRowsOption = options.BadRows.refuse,
    tier: Annotated[str | None, typer.Option(help="tier to ask for; the server decides")] = None,
    memory: Annotated[
        str, typer.Option(help="memory this device offers, like 64MiB; default: what it has")
    ] = "",
    engine: Annotated[
        options.EngineChoice, typer.Option(help="runtime that runs the graphs")
    ] = options.EngineChoice.onnx,
    threads: Annotated[
        int, typer.Option(min=0, help="most threads of the engine; 0: its processors where tuned, else 1")
    ] = 0,
    tune: Annotated[
        bool | None,
        typer.Option(
            help="time forms of a step and its threads in the first round, and keep the fastest; --no-tune: run the step "
            "as it is; default: the form that suits the processor"
        ),
    ] = None,
    sandbox: Annotated[
        options.Sandbox,
        typer.Option(
            help="run graphs in a process that may little; auto: unless --server-key vouches for them"
        ),
    ] = options.Sandbox.auto,
    policy: Annotated[
        Path | None, typer.Option(help="a TOML file of what this device may do, and when")
    ] = None,
    mirror: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a mirror of this device's own, like http://gateway.lan:8480; asked before all others"
        ),
    ] = None,
    surroundings_command: Annotated[
        str,
        typer.Option(
            help="a command that prints lines such as `power = battery`, where the system does not say in what conditions "
            "this device is"
        ),
    ] = "",
    until_done: Annotated[bool, typer.Option(help="stop when the training is done")] = False,
    limit: Annotated[list[str] | None, typer.Option(help="a limit as key=value, e.g. fetch_window=4")] = None,
    server_key: Annotated[
        str,
        typer.Option(
            help="listen to this key of the server only (hex; several with commas); default: the first seen"
        ),
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="EDGEFL_TOKEN",
            callback=options.without_secret,
            help="@FILE that holds a one-time token of `edgefl enroll token`",
        ),
    ] = "",
    ca_file: options.CaFile = "",
    cert_file: options.CertFile = "",
    key_file: options.KeyFile = "",
    password_file: options.PasswordFile = "",
    insecure_password: options.InsecurePassword = False,
    as_json: Annotated[bool, typer.Option("--json", help="events as JSON lines")] = False,
) -> None:
    if ctx.invoked_subcommand is not None:
        return
    from edgefl.cli.device import process

    settings = process.DeviceSettings(
        federation=checked_name("federation", federation),
        device=checked_name("device", device_id),
        broker=options.address(
            broker, ca_file, cert_file, key_file, password_file, insecure_password=insecure_password
        ),
        data=str(data),
        bad_rows=bad_rows.value,
        folder=str(store or folders.store(federation, device_id)),
        tier=tier or "",
        server_key=options.checked_key(server_key),
        token=options.token_text(token),
        memory=options.parse_bytes(memory, "--memory") if memory else 0,
        until_done=until_done,
        limits=options.parse_limits(limit or []),
        engine=engine.value,
        threads=threads,
        tune=tune,
        sandbox=sandbox.value,
        policy=str(policy) if policy else None,
        mirrors=tuple(str(Mirror.parse(text)) for text in mirror or ()),
        surroundings_command=surroundings_command,
        as_json=as_json,
    )
    if isinstance(ctx.obj, SettingsPipe):
        ctx.obj.send(settings)
    else:
        process.load()
        process.run(settings)

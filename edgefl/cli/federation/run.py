"""``edgefl run``: train a federation on one machine."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.api.progress import reporting
from edgefl.cli import interrupts
from edgefl.cli.federation.web import (
    PAGES,
    Dashboard,
    Web,
    WebBroker,
    WebCertFile,
    WebKeyFile,
    WebOptions,
    page_beside,
    web_beside,
)
from edgefl.cli.options import (
    EngineChoice,
    HelpAll,
    Mlflow,
    ModelName,
    Seed,
    Tensorboard,
    writable_folder,
)
from edgefl.cli.output import console, errors, print_json
from edgefl.wire.text import metric_text

if TYPE_CHECKING:
    from edgefl.api.run import News, PreparedRun

METHOD, MACHINE = "Method", "Broker, data and agents"
Downlink = StrEnum("Downlink", ["float32", "float16", "int8"])


def run(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    out: Annotated[Path, typer.Option(callback=writable_folder, help="folder of the run")] = Path(
        "runs/latest"
    ),
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds to train")] = None,
    seed: Seed = None,
    data: Annotated[
        Path | None, typer.Option(rich_help_panel=MACHINE, help="folder with the dataset's standard files")
    ] = None,
    model: ModelName = None,
    tiers: Annotated[
        str | None,
        typer.Option(metavar="TIER,...", help="[NAME=]KIND[:SIZE][*DEVICES]; see `edgefl ls kinds`"),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=METHOD,
            help="NAME[:KEY=VALUE,...], what training minimises; `edgefl ls losses` lists them, "
            "FILE.py:FUNCTION is your own",
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE]",
            help="how devices train; see `edgefl ls algorithms`, or FILE.py:FACTORY",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=METHOD,
            help="NAME[:KEY=VALUE,...] at the server; `edgefl ls optimizers` lists them",
        ),
    ] = None,
    engine: Annotated[
        EngineChoice | None,
        typer.Option(
            rich_help_panel=MACHINE, help="runtime of every device; default: as each tier of the file says"
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(metavar="NAME[:KEY=VALUE]", help="how updates become bytes; see `edgefl ls codecs`"),
    ] = None,
    downlink_encoding: Annotated[
        Downlink | None,
        typer.Option(
            rich_help_panel=METHOD, help="how weights travel to the devices; int8: what changed in them"
        ),
    ] = None,
    broker_kind: Annotated[
        str | None, typer.Option(rich_help_panel=MACHINE, help="amqtt (embedded) or mosquitto")
    ] = None,
    download: Annotated[
        bool, typer.Option(rich_help_panel=MACHINE, help="fetch the dataset if no folder has it")
    ] = False,
    faults: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=MACHINE, help="faults on purpose: bad links, killed processes, ... (TOML or JSON)"
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="discard an earlier run in --out")] = False,
    tensorboard: Tensorboard = False,
    mlflow: Mlflow = None,
    dashboard: Dashboard = "",
    web: Web = "",
    web_devices: Annotated[
        int,
        typer.Option(
            rich_help_panel=PAGES, min=0, help="with --web: browsers that the first round waits for"
        ),
    ] = 1,
    web_cert_file: WebCertFile = "",
    web_key_file: WebKeyFile = "",
    web_broker: WebBroker = "",
    agents: Annotated[
        str,
        typer.Option(
            rich_help_panel=MACHINE,
            metavar="KIND:COUNT,...",
            help="which agents are the devices, instead of the tiers' counts: python, cpp, web, like python:2,cpp:2,web:2",
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per round")] = False,
    help_all: HelpAll = False,
) -> None:
    """Train on one machine: broker, server and devices as processes.

    Without a federation file it runs the demo: 2 strong, 2 moderate and 2 weak devices train a ResNet-8 with EmbracingFL.

    Examples:

      edgefl run --out runs/first

      edgefl run federation.toml --rounds 20 --seed 1 --out runs/second

      edgefl run --tiers "strong,weak,half=width:1/4" --out runs/mixed

    Methods:

      edgefl run --algorithm per_fedavg:mode=hf,alpha=0.03 --codec fedbat --out runs/one-bit

      edgefl run --algorithm my/file.py:mine:lr=0.1 --out runs/own      (docs/tutorials/new-method.md)

    Engines, agents and pages:

      edgefl run --engine executorch --out runs/phones      (needs 'edgefl-tiers\\[executorch]')

      edgefl run --agents python:2,cpp:2,web:2 --faults faults.toml      (docs/security/faults.md has a schedule)

      edgefl run --dashboard --web --out runs/watched      (phones scan a QR code and join, docs/agents/web.md)
    """

    from edgefl.config.reading import check_names
    from edgefl.lab.agents import parse_agents
    from edgefl.lab.faults.schedule import load_schedule
    from edgefl.lab.lab import refuse_finished
    from edgefl.setup.federation_options import FederationOptions
    from edgefl.setup.tiers import check_counts, check_tiers
    from edgefl.setup.torch_start import without_dynamo

    page = WebOptions(web, web_cert_file, web_key_file, web_broker)
    page.check()
    options = FederationOptions(
        rounds=rounds,
        seed=seed,
        data=data,
        download=download,
        model=model,
        tiers=tiers,
        algorithm=algorithm,
        codec=codec,
        loss=loss,
        optimizer=optimizer,
        engine=engine,
        downlink_encoding=downlink_encoding,
        broker_kind=broker_kind,
        tensorboard=tensorboard,
        mlflow=mlflow,
    )
    schedule = None if faults is None else load_schedule(faults)
    counts = parse_agents(agents) if agents else {}
    # torch, which all that follows loads, takes seconds
    early = check_names(config, options.settings)
    early.tracking.check_packages()
    check_tiers(tiers or "")
    if not (tiers or agents or web):
        check_counts(early.tiers)
    if not fresh:
        refuse_finished(out.resolve())
    without_dynamo()
    with reporting("loading torch"):
        import torch  # noqa: F401
    from edgefl.api.federation import with_options
    from edgefl.api.run import prepare
    from edgefl.lab.agents import with_agents
    from edgefl.setup.evaluation import perplexity_to_beat
    from edgefl.setup.tiers import idle_tiers, with_guests

    federation = with_options(config, options)
    if web:
        federation = with_guests(with_agents(federation, counts) if counts else federation, web_devices)
    with reporting("reading the data and looking at the tiers"):
        prepared = prepare(federation, out, fresh=fresh, agents=counts)
    if schedule is not None:
        prepared.lab.disturb(schedule)
    if not as_json:
        made = prepared.federation
        console.print(
            f"[bold]{made.federation.name}[/]: {made.model.name} on {prepared.dataset.name}, "
            f"{len(prepared.lab.devices)} devices",
            markup=True,
        )
        for tier in idle_tiers(made) if not web else ():
            console.print(
                f"tier {tier} has no devices here: say how many in `tiers.{tier}.count`", style="yellow"
            )
        if (unigram := perplexity_to_beat(prepared.dataset)) is not None:
            console.print(
                f"the unigram model of its training text has {metric_text('perplexity', unigram)} on its test text"
            )
    with page_beside(dashboard, prepared.lab.folder), _browsers(page, prepared, as_json):
        _watch(prepared, as_json)


def _browsers(page: WebOptions, prepared: PreparedRun, as_json: bool) -> AbstractContextManager[None]:
    """Return a context that serves the page for browsers if --web is given, else an empty context."""
    if not page.listen:
        return nullcontext()
    lab = prepared.lab
    return web_beside(page, lab.folder, prepared.federation, lab.address, lab.public_key, code=not as_json)


def _watch(prepared: PreparedRun, as_json: bool) -> None:
    from edgefl.cli.federation.live import RunView

    lab = prepared.lab
    view = RunView(lab.federation, lab.devices, prepared.updates, live=not as_json)

    def take(news: News) -> None:
        round_row = view.take(news)
        if as_json and round_row is not None:
            print_json(round_row)

    signal.signal(signal.SIGTERM, interrupts.handler)
    try:
        with view:
            prepared.train(take)
    except KeyboardInterrupt:
        errors.print(f"stopped; `edgefl run --out {lab.folder}` with the same options goes on where it was")
        raise typer.Exit(interrupts.EXIT_CODE) from None
    if not as_json:
        view.conclude(lab.folder)

"""``edgefl profile``: measure the costs of bundles on this machine."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli import interrupts, options
from edgefl.cli.output import console, errors, print_json, print_table
from edgefl.system.files import write_text

if TYPE_CHECKING:
    from edgefl.api.bundle import Bundle
    from edgefl.wire.bundle.profiles import BundleProfile

_TIMEOUT_S = 300.0
_BROKER = "localhost:1883"


def profile(
    bundles: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="BUNDLE...", help="bundles or a folder of them, a federation file (.toml), or a model"
        ),
    ] = None,
    engine: Annotated[
        options.EngineChoice | None, typer.Option(help="default: the one that runs the bundle")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="samples a step; fixed in a bundle")] = None,
    repeat: Annotated[int, typer.Option(min=1, help="counted calls of each graph")] = 20,
    threads: Annotated[int, typer.Option(min=1, help="of the engine")] = 1,
    samples: Annotated[
        int, typer.Option(min=0, help="rows of the round that is watched; 0: two batches")
    ] = 0,
    tier: Annotated[list[str] | None, typer.Option(help="only this tier; may be repeated")] = None,
    run: Annotated[Path | None, typer.Option(help="folder of a run, for the accuracy of each tier")] = None,
    html: Annotated[
        Path | None,
        typer.Option(callback=options.writable_file, help="write a page with pictures to this file"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="a JSON list, one entry a bundle")] = False,
    fleet: Annotated[
        bool, typer.Option("--fleet", help="ask the devices of a federation, not this machine")
    ] = False,
    device_command: Annotated[
        str,
        typer.Option(
            metavar="CMD", help="profile through this agent too, which takes the options of `edgefl device`"
        ),
    ] = "",
    record: Annotated[
        Path | None,
        typer.Option(
            callback=options.writable_file,
            metavar="FILE",
            help="write what was measured, for --import elsewhere",
        ),
    ] = None,
    imported: Annotated[
        list[Path] | None,
        typer.Option(
            "--import", metavar="FILE", help="show recorded profiles beside the others; may be repeated"
        ),
    ] = None,
    broker: options.Broker = _BROKER,
    federation: Annotated[str, typer.Option(help="with --fleet: name of the federation")] = "demo",
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="with --fleet: only this device, waited for, may be repeated; else what the measured one is called"
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, max=86_400, help="with --fleet or --device-command: seconds to wait")
    ] = _TIMEOUT_S,
    sign_key: Annotated[
        Path | None, typer.Option(help="with --fleet: file with the key that signs the federation's bundles")
    ] = None,
    ca_file: options.CaFile = "",
    cert_file: options.CertFile = "",
    key_file: options.KeyFile = "",
    password_file: options.PasswordFile = "",
    insecure_password: options.InsecurePassword = False,
) -> None:
    """Measure time and memory of a bundle's graphs here.

    It measures graph by graph and without torch: time, memory, energy, and the ops that cost most.

    Each graph runs in a fresh process on random inputs. Memory is anonymous memory above the idle agent, as in
    `edgefl plan`: planned at export, held by the engine's arena, and measured. Times of a step's forward, backward and
    update parts are measured by op where the engine supports it. Otherwise they are measured by instruction of its program
    and shared out within one. A federation file or a model's name is exported first.

    Examples:

      edgefl profile bundles/weak.efl

      edgefl profile bundles/*.efl --repeat 50 --html report.html --run runs/first

      edgefl profile resnet20 --batch 8 --tier weak --json      (exports on the fly; needs edgefl-tiers\\[server])

      edgefl profile federation.toml --engine executorch

    Agents:

      edgefl profile bundles/weak.efl --device-command edgefl-agent --record here.json      (this machine by two agents)

      edgefl profile --import here.json --import pixel.json      (recorded ones side by side)

    Fleets:

      edgefl profile --fleet --broker broker.lan --federation demo runs/demo      (asks the devices, and compares them)
    """

    from edgefl.cli.models.profile_fleet import (
        ProfileOptions,
        files_of,
        profile_beside,
        profile_fleet,
        refuse,
    )
    from edgefl.errors import ConfigError
    from edgefl_server.profiling.reports import read_recorded

    chosen = _BundleSelection(batch, engine.value if engine else "", tuple(tier or ()))
    targets = list(files_of(bundles or ()))
    for target in targets:
        _check_target(target, chosen.tiers)
    _check_places(html, run)
    others = tuple(report for path in imported or () for report in read_recorded(path))
    if not targets and (fleet or device_command or not others):
        raise ConfigError("name a bundle, a federation file or a model to profile")
    if fleet:
        refuse({"--device-command": bool(device_command)}, fleet=True)
        refuse({"--threads": threads != 1, "--samples": samples != 0, "--run": run is not None}, fleet=True)
    elif device_command or record or others:
        refuse({"--run": run is not None, "--sign-key": sign_key is not None}, fleet=False, beside=True)
        if device and len(device) > 1:
            raise ConfigError(
                f"one device measures, and --device names {len(device)}: name one, or ask several by --fleet"
            )
    if fleet or device_command or record or others:
        places = (ca_file, cert_file, key_file, password_file)
        named = fleet or broker != _BROKER or any(places)
        measuring = ProfileOptions(
            broker=options.address(broker, *places, insecure_password=insecure_password) if named else None,
            federation=federation,
            devices=tuple(device or ()),
            repeat=repeat,
            timeout_s=timeout,
            threads=threads,
            samples=samples,
            command=device_command,
            sign_key=sign_key,
            html=html,
            as_json=as_json,
            record=record,
            imported=others,
        )
        wanted = _find_bundles(targets, replace(chosen, main_only=True)) if targets else iter(())
        if fleet:
            profile_fleet([bundle.contents for bundle in wanted], measuring)
        else:
            with _interrupt_on_sigterm():
                profile_beside(list(wanted), measuring)
        return
    fleet_only = {"--device": bool(device), "--sign-key": sign_key is not None, "--ca-file": bool(ca_file)}
    fleet_only |= {"--cert-file": bool(cert_file or key_file), "--password-file": bool(password_file)}
    refuse(fleet_only | {"--timeout": timeout != _TIMEOUT_S}, fleet=False)
    from edgefl.analysis.profiles.accuracy import accuracy_of, check_same_model

    profiles: list[BundleProfile] = []
    with _interrupt_on_sigterm():
        accuracy = accuracy_of(run) if run else None
        for bundle in _find_bundles(targets, chosen):
            if run:
                check_same_model(run, bundle.manifest)
            profiles.append(
                bundle.profile(engine=chosen.engine, threads=threads, repeat=repeat, samples=samples)
            )
    if as_json:
        print_json(profiles)
    else:
        _print(profiles)
    if html:
        from edgefl.analysis.profiles.rows import page

        title = f"Profile of {', '.join(dict.fromkeys(each.model for each in profiles))}"
        write_text(html, page(title, profiles, accuracy))
        errors.print(f"page: {html}")


def _check_target(target: str, tiers: Sequence[str]) -> None:
    """Check a federation file or the name of a model, and that it has the ``tiers``.

    Loads no torch; bundles are not checked.

    Raises:
        ConfigError: if the file, the model or a tier does not exist.
    """
    if _is_bundle(target):
        return
    from edgefl.config.reading import check_names, check_tiers

    file = Path(target) if target.endswith(".toml") else None
    check_tiers(check_names(file, {} if file else {"model.name": target}), tiers)


def _check_places(html: Path | None, run: Path | None) -> None:
    """Create the folder of the page, and check the options --run and --html, before measurements begin.

    Raises:
        ConfigError: if ``run`` is given without ``html``, or is no folder.
    """
    from edgefl.errors import ConfigError

    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
    if run and not html:
        raise ConfigError("--run puts the accuracy of each tier on the page: name the page too, by --html")
    if run and not run.is_dir():
        raise ConfigError(f"there is no folder {run}: name what `edgefl run --out` was given", path=str(run))


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Open a context in which SIGTERM acts like Ctrl-C: the measuring process ends, its folder is removed, the command
    exits.
    """
    before = signal.signal(signal.SIGTERM, interrupts.handler)
    try:
        yield
    except KeyboardInterrupt:
        errors.print("stopped")
        raise typer.Exit(interrupts.EXIT_CODE) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(profiles: list[BundleProfile]) -> None:
    from edgefl.analysis.profiles import rows

    _print_halves("Profile", rows.summary(profiles))
    for name, each in zip(rows.names_of(profiles), profiles, strict=True):
        _print_halves(f"{name}: graphs", rows.graphs(each))
        if each.io:
            print_table(f"{name}: multi-step forward pass", rows.chunks(each))
        if parts := rows.parts(each):
            print_table(f"{name}: parts of a training step", parts)
        if costly := rows.costliest(each):
            print_table(f"{name}: costliest ops of a training step", costly)
    for note in dict.fromkeys(note for each in profiles for note in rows.notes(each)):
        console.print(note)


def _print_halves(title: str, table: list[dict[str, str]]) -> None:
    """Print a table in two parts, times and then memory and sizes, because together they are too wide for a terminal."""
    name, *columns = table[0]
    middle = columns.index("planned MiB")
    for part, shown in (("", columns[:middle]), (", memory and size", columns[middle:])):
        print_table(title + part, [{key: row[key] for key in (name, *shown)} for row in table])


@dataclass(frozen=True)
class _BundleSelection:
    """Selection of bundles to measure.

    Attributes:
        batch: samples of a step; None for those of the bundle.
        engine: format of the bundles; "" for any.
        tiers: names of the tiers; empty for all.
        main_only: True to leave out all exchanges (round trips of an algorithm) but the main one.
    """

    batch: int | None
    engine: str
    tiers: tuple[str, ...]
    main_only: bool = False


def _find_bundles(targets: list[str], chosen: _BundleSelection) -> Iterator[Bundle]:
    """Yield the bundles that the arguments of the command name. Bundles of a model or a federation file are compiled.

    Raises:
        ConfigError: if no bundle is selected (raised at the end).
    """
    from edgefl.errors import ConfigError

    none = True
    for target in targets:
        for bundle in _read(target, chosen) if _is_bundle(target) else _export(target, chosen):
            none = False
            yield bundle
    if none:
        wishes = [f"of tier {' or '.join(chosen.tiers)}"] * bool(chosen.tiers)
        wishes += [f"in format {chosen.engine} (`edgefl export --format` makes one)"] * bool(chosen.engine)
        raise ConfigError(f"none of the bundles is {' and '.join(wishes)}")


def _read(target: str, chosen: _BundleSelection) -> Iterator[Bundle]:
    """Yield the bundle in a file if its tier and format are selected, else nothing.

    Raises:
        ConfigError: if it has another batch size than the selected one.
    """
    from edgefl.api.bundle import Bundle
    from edgefl.errors import ConfigError

    bundle = Bundle.load(target)
    manifest = bundle.manifest
    if chosen.batch not in (None, manifest.batch):
        raise ConfigError(
            f"{target} was exported with batch {manifest.batch}, which its graphs keep, not {chosen.batch}: export it "
            f"with that batch, or let `edgefl profile {manifest.model} --batch {chosen.batch}` do it",
            batch=manifest.batch,
            wanted=chosen.batch,
        )
    if manifest.tier in (chosen.tiers or (manifest.tier,)) and chosen.engine in ("", manifest.format):
        yield bundle


def _is_bundle(target: str) -> bool:
    """Return True if ``target`` is the path of a bundle, not of a federation file or the name of a model."""
    path = Path(target)
    return path.suffix == ".efl" or (path.suffix != ".toml" and (path.exists() or "/" in target))


def _export(target: str, chosen: _BundleSelection) -> Iterator[Bundle]:
    """Yield the bundles of the federation file or model ``target``, compiled as by `edgefl export`.

    A model has default settings. Only the bundles that ``chosen`` selects are compiled.
    """
    from edgefl.api.export import plan_export
    from edgefl.api.federation import load_federation

    path = Path(target) if target.endswith(".toml") else None
    changes: dict[str, object] = {} if path else {"model.name": target}
    federation = load_federation(path, changes | ({"algorithm.batch": chosen.batch} if chosen.batch else {}))
    formats = (chosen.engine,) if chosen.engine else ()
    what = plan_export(federation, tiers=chosen.tiers, formats=formats, main_only=chosen.main_only)
    yield from what.bundles(lambda _: None, 1)

"""``edgefl device personalize``: the current model, adapted to this device's data. Never imports torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgefl.cli import options
from edgefl.cli.output import console, print_json, print_table
from edgefl.errors import ConfigError
from edgefl.wire.text import metric_value

if TYPE_CHECKING:
    from edgefl.api.adapt import DeviceModel
    from edgefl_device.config import Policy
    from edgefl_device.data.samples import LocalSource
    from edgefl_device.personal.personalize import PersonalizationReport

Protocol = StrEnum("Protocol", ["train_support", "split_test", "paper_literal"])


def personalize(
    data: options.LocalData,
    device_id: Annotated[str, typer.Option("--id", help="name of this device; not needed offline")] = "",
    broker: options.Broker = "localhost:1883",
    federation: Annotated[str, typer.Option(help="name of the federation")] = "demo",
    tier: Annotated[
        str | None, typer.Option(help="tier whose model to take; default: the only one there is")
    ] = None,
    test_data: Annotated[Path | None, typer.Option(help="samples to judge by, in the same forms")] = None,
    protocol: Annotated[
        Protocol, typer.Option(help="what is adapted to, and what judges")
    ] = Protocol.train_support,
    steps: Annotated[int, typer.Option(min=0, help="steps to take")] = 1,
    bad_rows: options.BadRowsOption = options.BadRows.refuse,
    curve: Annotated[bool, typer.Option("--curve", help="also after 0, 1, 2, 5 and 10 steps")] = False,
    alpha: Annotated[
        float | None, typer.Option(min=0, help="size of a step; default: the round's own")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="decides the split, the batches and noise")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(callback=options.writable_file, help="file for the adapted weights (safetensors)"),
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="a bundle file, instead of the broker's")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="weights for --bundle: model.safetensors of a run, or what --out wrote"),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="folder for what is fetched; default: ~/.edgefl/FEDERATION/ID/personalize"),
    ] = None,
    engine: Annotated[
        options.EngineChoice, typer.Option(help="runtime that runs the graphs")
    ] = options.EngineChoice.onnx,
    threads: Annotated[int, typer.Option(min=1, help="threads of the engine")] = 1,
    limit: Annotated[list[str] | None, typer.Option(help="a limit as key=value, e.g. fetch_window=4")] = None,
    server_key: Annotated[
        str, typer.Option(help="listen to this key of the server only (hex; several with commas)")
    ] = "",
    ca_file: options.CaFile = "",
    cert_file: options.CertFile = "",
    key_file: options.KeyFile = "",
    password_file: options.PasswordFile = "",
    insecure_password: options.InsecurePassword = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Adapt the current model to this device's data.

    It takes a few steps, and prints the metrics before and after them.

    The model is the one announced last, whether or not a round is open. Support are the samples that it is adapted to,
    query those that it is evaluated on. train_support takes --data as support and --test-data as query (without one, a
    stratified fifth of --data is held out); split_test halves --test-data (else --data); paper_literal evaluates on the
    samples that it adapts to, which leaks, for comparison only. Nothing is sent, and the agent may run meanwhile.

    Examples:

      edgefl device personalize --id phone-7 --data my-data.npz --curve

      edgefl device personalize --id phone-7 --data my-data.npz --test-data later.npz --steps 5 --out mine.safetensors

      edgefl device personalize --bundle strong.efl --weights model.safetensors --data my-data.npz --json      (offline)
    """

    from edgefl.api.adapt import adapt, announced, of_files
    from edgefl.api.bundle import Bundle
    from edgefl.wire import tensors
    from edgefl_device.data import sources
    from edgefl_device.data.problems import checked_policy
    from edgefl_device.data.support import checked_protocol
    from edgefl_device.personal.personalize import CURVE, Adaptation

    policy = checked_policy(bad_rows.value)
    local = sources.load(data, policy)
    wanted = Adaptation(
        protocol=checked_protocol(protocol.value),
        steps=steps,
        curve=CURVE if curve else (),
        alpha=alpha,
        seed=seed,
        test=_judging(data, test_data, policy),
    )
    opened: AbstractContextManager[DeviceModel]
    if bundle or weights:
        if bundle is None or weights is None:
            raise ConfigError("--bundle and --weights go together: give both, or neither for the broker's")
        opened = nullcontext(of_files(Bundle.load(bundle), weights, store))
    elif not device_id:
        raise ConfigError(
            "give the name of this device by --id, or --bundle and --weights to work without a broker"
        )
    else:
        files = (ca_file, cert_file, key_file, password_file)
        opened = announced(
            federation,
            device_id,
            broker=options.address(broker, *files, insecure_password=insecure_password),
            tier=tier or "",
            folder=store,
            server_key=options.checked_key(server_key),
            limits=options.parse_limits(limit or []),
            engine=engine.value,
        )
    with opened as model:
        report, adapted = adapt(model, local, wanted, engine=engine.value, threads=threads)
    if out is not None:
        _write(out, tensors.dump(adapted))
    if as_json:
        print_json(report)
    else:
        _show(report, out)


def _judging(data: Path, test_data: Path | None, policy: Policy) -> LocalSource | None:
    from edgefl_device.data import sources

    if test_data is None:
        return None
    if test_data.resolve() == data.resolve():
        raise ConfigError(
            f"--test-data is {data} too, so that the model would be adapted to what judges it: leave --test-data out, and a "
            "part of --data is held out"
        )
    return sources.load(test_data, policy)


def _write(path: Path, content: bytes) -> None:
    from edgefl.system.files import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content)


def _show(report: PersonalizationReport, out: Path | None) -> None:
    rows = [
        {
            "steps": point.steps,
            **{name: metric_value(name, value, 2) for name, value in point.metrics.items()},
        }
        | {"loss": round(point.loss, 4)}
        for point in report.curve
    ]
    what = f"{report.model} as tier {report.tier} has it, version {report.model_version[:12]}, steps of {report.alpha:g}"
    console.print(what)
    print_table("On the query samples", rows)
    lines = [
        f"{report.protocol}: {report.note}",
        f"{report.support} samples to adapt to, {report.query} that judge, batches of {report.batch}"
        + (" with repetitions, as there are fewer samples" if report.repeated else ""),
        f"{report.metric} {metric_value(report.metric, report.before.value(report.metric), 2)} before, "
        f"{metric_value(report.metric, report.after.value(report.metric), 2)} after {report.after.steps} of these steps"
        + (
            ""
            if report.majority is None
            else f"; its most frequent class alone reaches an accuracy of {report.majority:.2%}"
        ),
    ]
    if out is not None:
        lines.append(f"adapted weights: {out}")
    console.print("\n".join(lines))

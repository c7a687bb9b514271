"""``edgefl plan``: which submodels fit a device, and which one to take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgefl.cli.options import ModelName, ModelOptions, named_model
from edgefl.cli.output import console, print_json, print_table, progress
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.models.spec import ModelSpec
    from exporters.fit import Fit, Offer


def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    model: ModelName = None,
    option: ModelOptions = None,
    memory: Annotated[str, typer.Option(help="memory for training over the idle process, like 64MiB")] = "",
    downlink: Annotated[str, typer.Option(help="like 1MB/s or 8Mbit/s")] = "",
    uplink: Annotated[str, typer.Option(help="like 200kB/s")] = "",
    compute: Annotated[float, typer.Option(min=0, help="speed in training, GMAC/s")] = 0.0,
    round_seconds: Annotated[float, typer.Option(min=0, help="longest round, transfer and computing")] = 0.0,
    batch: Annotated[int, typer.Option(min=0, help="samples per local step; 0: the program's own")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="local steps per round; 0: the program's own")] = 0,
    kinds: Annotated[list[str] | None, typer.Option(help="kinds of submodels, default: all")] = None,
    gamma: Annotated[
        list[str] | None, typer.Option(help="sizes like 1/16,0.25; default: the paper's")
    ] = None,
    device: Annotated[Path | None, typer.Option(help="device file (TOML) with the same keys")] = None,
    hello: Annotated[Path | None, typer.Option(help="a device's hello message, saved")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object: submodels, recommended, ...")
    ] = False,
) -> None:
    """List the submodels of a model that fit a device, with what each would cost it, and recommend one.

    Memory is predicted from the training graphs, as the peak over the idle process of the graph of a round that needs most;
    bytes count a round's downloads and upload. Recommended is what trains most of the model: the largest geometric
    mean of its shares of parameters and of multiplications. An importance submodel moves few bytes, but computes at full
    width, with zeros: its memory and time exceed the whole model's. Where --memory is given, sizes that are far
    from it are not traced, and the memory of these is approximate (~). One that is dead at the initial weights (its output
    ignores its input, or no gradient gets below the classifier) would not train and is never recommended. Tracing takes a
    second or two for each size.

    Examples:

      edgefl plan --model resnet18 --memory 128MiB --downlink 1MB/s --uplink 200kB/s

      edgefl plan federation.toml --device phone.toml --json   (memory = "96MiB", downlink = "8Mbit/s", compute = 2.5, ...)

    Own models, and saved hellos:

      edgefl plan --model mine.py:make --option classes=5 --option 'sample_shape=[3,20,20]' --memory 24MiB

      edgefl plan --model cnn --hello hello.bin --kinds width,importance --gamma 1/16,1/4 --round-seconds 60
    """

    from edgefl.cli.models import fit
    from edgefl.setup.torch_start import without_dynamo

    without_dynamo()
    wishes = fit.Wishes(
        memory=memory,
        downlink=downlink,
        uplink=uplink,
        compute=compute,
        round_seconds=round_seconds,
        batch=batch,
        steps=steps,
        kinds=fit.listed(kinds or ()),
        gamma=list(fit.gammas(gamma or ())),
    )
    wishes = wishes.or_else(fit.read_device(device) if device else fit.Wishes())
    wishes = wishes.or_else(fit.read_hello(hello) if hello else fit.Wishes())
    with progress(f"{model or config or 'plan'}: building the model") as say:
        federation, spec = _model(config, model, option or (), fit.overrides(wishes))
        made = fit.planned(federation, spec, wishes, say)
    if as_json:
        print_json(as_object(spec.name, made))
    else:
        _show(spec.name, made)


def _model(
    config: Path | None, model: str | None, options: Any, overrides: dict[str, object]
) -> tuple[Federation, ModelSpec]:
    """A federation file's model is fitted to its data; without any, the model has its own default input."""
    from edgefl.config import load, without_devices
    from edgefl.setup.model import federation_model
    from edgefl.setup.shapes import samples_like
    from edgefl.wire.errors import ConfigError

    if config is None and model is None:
        raise ConfigError("give a federation file, or --model with a model of `edgefl ls models`")
    federation = without_devices(load(config, {**named_model(model, options), **overrides}))
    return federation, federation_model(federation, samples_like(federation))


def as_object(model: str, made: Fit) -> dict[str, Any]:
    """What ``--json`` prints. ModelError if nothing fits."""
    return {
        "model": model,
        "recommended": made.recommended(),
        "reason": made.reason(),
        "submodels": made.fitting,
        "too_large": [offer for offer in made.offers if offer.problem],
        "left_out": [
            {"kind": size.kind, "size": size.label, "reason": error.message} for size, error in made.left_out
        ],
    }


def _show(model: str, made: Fit) -> None:
    best = made.recommended()
    rows = [_row(offer, offer is best) for offer in made.fitting]
    notes = {
        f"{offer.kind} {offer.note.split(',')[0]}" for offer in made.fitting if offer.kept_macs < offer.macs
    }
    notes |= {"~: guessed from other sizes" for offer in made.fitting if offer.memory_about}
    notes |= {"dead: at the initial weights, would not train" for offer in made.fitting if offer.dead}
    large = len(made.offers) - len(made.fitting)
    print_table(f"{model}: {len(rows)} submodels fit, {large} do not", rows, "; ".join(sorted(notes)))
    for line in _left_out(made):
        console.print(line, soft_wrap=True)
    console.print(f"recommended: {made.reason()}", soft_wrap=True)


def _left_out(made: Fit) -> list[str]:
    """A line for each kind and reason."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for left, error in made.left_out:
        sizes.setdefault((left.kind, error.message), []).append(left.label)
    return [
        f"left out: {kind}, {labels[0] if len(labels) == 1 else f'{len(labels)} sizes'}: {reason}"
        for (kind, reason), labels in sizes.items()
    ]


def _row(offer: Offer, best: bool) -> dict[str, Any]:
    """The columns that fit 80 characters; ``--json`` has them all."""
    timed = offer.transfer_s is not None or offer.compute_s is not None
    return {
        "submodel": f"{offer.kind}, {offer.size}" + (" *" if best else " (dead)" if offer.dead else ""),
        "memory": "~" * offer.memory_about + size(offer.memory_bytes),
        "params": f"{offer.parameter_share:.1%}",
        "MMAC": f"{offer.macs / 1e6:,.1f}",
        "MB down": f"{offer.download_bytes / 1e6:.2f}",
        "MB up": f"{offer.upload_bytes / 1e6:.2f}",
        **({"s/round": f"{offer.seconds:,.1f}"} if timed else {}),
    }

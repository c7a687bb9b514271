"""``edgefl plan``: list the submodels that fit a device, and recommend one."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from edgefl.api.progress import reporting
from edgefl.cli.options import ModelName, ModelOptions
from edgefl.cli.output import console, print_json, print_table
from edgefl.errors import ConfigError, ProtocolError
from edgefl.system.forks import processes_for
from edgefl.system.memory import uncollected_objects
from edgefl.system.sizes import size

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.models.spec import ModelSpec
    from edgefl.submodels.submodel import Submodel
    from edgefl_export.device import Device
    from edgefl_export.offers import Fit, SubmodelOffer


def plan(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="federation file (TOML)")] = None,
    model: ModelName = None,
    option: ModelOptions = None,
    memory: Annotated[str, typer.Option(help="memory for training above the idle agent, like 64MiB")] = "",
    downlink: Annotated[str, typer.Option(help="like 1MB/s or 8Mbit/s")] = "",
    uplink: Annotated[str, typer.Option(help="like 200kB/s")] = "",
    compute: Annotated[float, typer.Option(min=0, help="speed in training, GMAC/s")] = 0.0,
    round_seconds: Annotated[float, typer.Option(min=0, help="longest round, transfer and computing")] = 0.0,
    batch: Annotated[
        int | None, typer.Option(min=1, help="samples per local step; default: the algorithm's own")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="local steps per round; default: the algorithm's own")
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="a kind of `edgefl ls kinds`, or several with commas; default: all"),
    ] = None,
    gamma: Annotated[
        list[str] | None, typer.Option(help="sizes like 1/16,0.25; default: the paper's")
    ] = None,
    device_file: Annotated[Path | None, typer.Option(help="device file (TOML) with such keys")] = None,
    hello: Annotated[Path | None, typer.Option(help="a device's hello message, saved")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object: submodels, recommended, ...")
    ] = False,
) -> None:
    """List the submodels that fit a device, and recommend one.

    Each is listed with what it would cost the device.

    Memory is anonymous memory above the idle agent at the peak of a round, predicted from the graph that needs most; bytes
    count a round's downloads and upload. Recommended is what trains most of the model: the largest geometric
    mean of its shares of parameters and of multiplications. An importance submodel moves few bytes, but computes at full
    width, with zeros: its memory and time exceed the whole model's. Where --memory is given, sizes that are far
    from it are not traced, and the memory of these is approximate (~). One that is dead at the initial weights (its output
    ignores its input, or no gradient gets below the classifier) would not train and is never recommended. Tracing takes a
    second or two for each size.

    Examples:

      edgefl plan --model resnet18 --memory 128MiB --downlink 1MB/s --uplink 200kB/s

      edgefl plan federation.toml --device-file phone.toml   (memory = "96MiB", downlink = "8Mbit/s", compute = 2.5, ...)

    Own models, and saved hellos:

      edgefl plan --model mine.py:make --option classes=5 --option 'sample_shape=[3,20,20]' --memory 24MiB

      edgefl plan --model cnn --hello hello.bin --kind width,importance --gamma 1/16,1/4 --round-seconds 60
    """

    from edgefl.config.reading import check_names
    from edgefl.setup.federation_options import FederationOptions

    options = PlanOptions(
        memory=memory,
        downlink=downlink,
        uplink=uplink,
        compute=compute,
        round_seconds=round_seconds,
        batch=batch or 0,
        steps=steps or 0,
        kinds=split_commas(kind or ()),
        gamma=list(gammas(gamma or ())),
    )
    options = options.or_else(read_device(device_file) if device_file else PlanOptions())
    options = options.or_else(read_hello(hello) if hello else PlanOptions())
    options.check()
    if config is None and model is None:
        raise ConfigError("give a federation file, or --model with a model of `edgefl ls models`")
    # torch, which all that follows loads, takes seconds
    settings = FederationOptions(model=model, model_options=option or ()).settings
    named = check_names(config, settings).model.name
    with reporting(f"{model or config or 'plan'}: building the model") as say:
        with uncollected_objects():
            from edgefl.setup.torch_start import load_export, without_dynamo

            load_export() if ":" in named else without_dynamo()
            federation, spec = _model(config, settings | overrides(options))
        made = fit_submodels(federation, spec, options, say)
    if as_json:
        print_json(as_object(spec.name, made))
    else:
        _show(spec.name, made)


def _model(config: Path | None, settings: dict[str, object]) -> tuple[Federation, ModelSpec]:
    """Return (federation, its model) for a federation file and settings that replace its keys.

    The model is fitted to the data; without data it has its own default input.
    """
    from edgefl.config import load, without_devices
    from edgefl.setup.model import model_with_samples

    federation = without_devices(load(config, settings))
    return federation, model_with_samples(federation)[0]


def as_object(model: str, made: Fit) -> dict[str, Any]:
    """Return the object that ``--json`` prints: ``model``, ``recommended``, ``reason``, ``submodels``, ``too_large``,
    ``left_out``.

    Raises:
        ModelError: if no submodel fits.
    """
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
        console.print(line)
    console.print(f"recommended: {made.reason()}")


def _left_out(made: Fit) -> list[str]:
    """Return a line of text for each (kind, reason) for which submodels were left out."""
    sizes: dict[tuple[str, str], list[str]] = {}
    for left, error in made.left_out:
        sizes.setdefault((left.kind, error.message), []).append(left.label)
    return [
        f"left out: {kind}, {labels[0] if len(labels) == 1 else f'{len(labels)} sizes'}: {reason}"
        for (kind, reason), labels in sizes.items()
    ]


def _row(offer: SubmodelOffer, best: bool) -> dict[str, Any]:
    """Return the table row of a submodel by column, short enough for 80 characters.

    ``best``: True for the recommended one.
    """
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


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of `edgefl plan`, which are also the keys of a device file: capacity of a device, and submodels to consider.

    Omitted options are unknown, or have the algorithm's defaults (``batch``, ``steps``).

    Attributes:
        memory: memory for training above the idle process, like 64MiB.
        downlink: rate like 1MB/s or 8Mbit/s.
        uplink: rate like the downlink's.
        compute: speed in training, in GMAC/s.
        round_seconds: longest round.
        batch: samples per local step.
        steps: local steps per round.
        samples: number of samples of the device.
        kinds: kinds of submodels to consider; empty for all.
        gamma: sizes to consider, shares of the parameters; empty for the defaults.
    """

    memory: str | int = ""
    downlink: str = ""
    uplink: str = ""
    compute: float = 0.0
    round_seconds: float = 0.0
    batch: int = 0
    steps: int = 0
    samples: int = 0
    kinds: list[str] = []
    gamma: list[float | str] = []

    def or_else(self, other: PlanOptions) -> PlanOptions:
        """Return a copy in which omitted keys have the values of ``other``."""
        return msgspec.structs.replace(other, **{name: value for name, value in self._given_values()})

    def _given_values(self) -> list[tuple[str, Any]]:
        return [(name, value) for name in self.__struct_fields__ if (value := getattr(self, name))]

    def check(self) -> None:
        """Check the values without loading torch.

        Raises:
            ConfigError: if a size, a rate, a kind or a share cannot be used.
        """
        from edgefl.config.names import check_kinds

        self.device  # noqa: B018  its sizes and rates are parsed
        gammas(map(str, self.gamma))
        check_kinds(self.kinds)

    @property
    def device(self) -> Device:
        """The capacity of the device.

        Raises:
            ConfigError: if a memory size or rate cannot be read, or a number is negative; the text names it.
        """
        from edgefl_export.device import Device

        wrong = [
            name
            for name, value in self._given_values()
            if isinstance(value, int | float) and not 0 <= value < math.inf
        ]
        if wrong:
            raise ConfigError(f"argument `{wrong[0]}` is a number from 0 on, found {getattr(self, wrong[0])}")
        return Device(
            memory=str(self.memory) if self.memory else 0,
            downlink=self.downlink or 0.0,
            uplink=self.uplink or 0.0,
            compute=self.compute * 1e9,
            round_seconds=self.round_seconds,
            samples=self.samples,
        )


def read_device(path: Path) -> PlanOptions:
    """Return the values in a device file (TOML).

    Raises:
        ConfigError: if the file does not exist or cannot be used; the text names the key.
    """
    from edgefl.config.text import parse_toml

    try:
        options = msgspec.convert(parse_toml(path.read_text(encoding="utf-8-sig")), PlanOptions, strict=False)
    except FileNotFoundError as error:
        raise ConfigError(f'there is no device file {path}; write one with memory = "64MiB"') from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        known = ", ".join(PlanOptions.__struct_fields__)
        raise ConfigError(f"{path} is no device file: {error}; it has the keys {known}") from error
    try:
        options.check()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message.replace('argument ', '').replace('`', '')}") from error
    return options


def read_hello(path: Path) -> PlanOptions:
    """Return options with the memory and samples of a saved hello message (msgpack as it was sent, or JSON).

    Raises:
        ConfigError: if the file does not exist or is no hello message.
    """
    from edgefl.wire.mqtt.envelope import peek
    from edgefl.wire.mqtt.messages import MALFORMED, Hello

    try:
        data = path.read_bytes()
        hello = msgspec.json.decode(data, type=Hello) if data[:1] == b"{" else peek(Hello, data)
    except FileNotFoundError as error:
        raise ConfigError(f"there is no hello message {path}") from error
    except (*MALFORMED, ProtocolError) as error:
        raise ConfigError(f"{path} is no hello message of a device: {error}") from error
    return PlanOptions(memory=f"{hello.memory_bytes}B", samples=hello.samples)


def fit_submodels(
    federation: Federation, spec: ModelSpec, options: PlanOptions, say: Callable[[str], None] = lambda _: None
) -> Fit:
    """Compute the costs of all submodels of ``spec`` on a device, trained by the federation's algorithm.

    Args:
        federation: the federation.
        spec: its model.
        options: capacity of the device, and the kinds and sizes to consider.
        say: called with progress texts.

    Returns:
        The submodels that fit, those that do not, and the reasons.
    """
    from edgefl.api.compile import plan
    from edgefl.api.training import Training
    from edgefl.setup.model import process_bytes

    return plan(
        spec,
        options.device,
        training=lambda submodel: Training.of(with_fitting_algorithm(federation, submodel)),
        kinds=options.kinds,
        gammas=gammas(map(str, options.gamma)),
        progress=say,
        processes=processes_for(process_bytes(spec)),
    )


def with_fitting_algorithm(federation: Federation, submodel: Submodel) -> Federation:
    """Return the federation with an algorithm that suits ``submodel``.

    It is ``tcbgd`` if the federation names none and the submodel has thresholds; else the federation is unchanged.
    """
    from edgefl.objective.carrier import ThresholdCarrier

    if "name" in federation.algorithm.model_fields_set or not isinstance(submodel.carrier, ThresholdCarrier):
        return federation
    return federation.model_copy(
        update={"algorithm": federation.algorithm.model_copy(update={"name": "tcbgd"})}
    )


def overrides(options: PlanOptions) -> dict[str, object]:
    """Return the settings of the federation that the options replace, by dotted key."""
    settings = {"algorithm.batch": options.batch, "algorithm.steps": options.steps}
    return {key: value for key, value in settings.items() if value}


def split_commas(values: Iterable[str]) -> list[str]:
    """Split texts at commas: ``["a,b", "c"]`` becomes ``["a", "b", "c"]``."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def gammas(values: Iterable[str]) -> list[float]:
    """Return texts such as 0.25 or 1/64, single or separated by commas, as numbers.

    Raises:
        ConfigError: if a text is no number above 0 and up to 1.
    """
    return [_number(text) for text in split_commas(values)]


def _number(text: str) -> float:
    top, slash, bottom = text.partition("/")
    try:
        share = float(top) / float(bottom) if slash else float(top)
    except (ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"a gamma is a number like 0.25 or 1/64, found {text!r}", found=text) from error
    if not 0 < share <= 1:
        raise ConfigError(f"a gamma is above 0 and at most 1, like 0.25 or 1/64; found {text!r}", found=text)
    return share

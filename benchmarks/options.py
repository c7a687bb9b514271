"""Options that several benchmarks share, and the check of names before the first measurement."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from edgefl.config.reading import check_names, check_tiers
from edgefl.errors import ConfigError
from edgefl.facts import shipped
from edgefl.setup.federation_options import FederationOptions, parse_algorithm, parse_named

Settings = TypeVar("Settings")

Json = Annotated[bool, typer.Option("--json", help="one JSON object: bench, machine, results")]
BrokerKind = Annotated[
    str, typer.Option("--broker-kind", help="auto (mosquitto where it is installed), mosquitto or amqtt")
]
ShareOfTasks = Annotated[float, typer.Option(min=0, max=1, help="share of the tasks")]
EngineThreads = Annotated[int, typer.Option(min=1, help="threads of the engine; a device's default is 1")]
ZooModel = Annotated[str, typer.Option(help="a model of `edgefl ls models`")]
Codecs = Annotated[
    list[str] | None,
    typer.Option(
        "--codec",
        metavar="NAME[:KEY=VALUE,...]",
        help="a codec of `edgefl ls codecs`, may be repeated; default: six",
    ),
]


def python_option(help: str) -> Any:
    """Return the option that takes the interpreter of another environment."""
    return typer.Option(metavar="PYTHON", callback=_installed_python, help=help)


def _installed_python(python: str) -> str:
    if python and shutil.which(python) is None:
        raise ConfigError(
            f"expected a Python interpreter, found {python!r}; give the path of one, such as environment/bin/python "
            "(`python -m benchmarks peer` makes environments)",
            python=python,
        )
    return python


def with_options(kind: type[Settings]) -> Callable[[Callable[[Settings], None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function of settings: each field is an option.

    Args:
        kind: a dataclass whose fields are annotated as typer's options.
    """

    def decorate(run: Callable[[Settings], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(kind(**values))

        hints = get_type_hints(kind, include_extras=True)
        options = [each for each in fields(kind) if each.init]  # type: ignore[arg-type]
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=each.default if each.default is not MISSING else inspect.Parameter.empty,
                    annotation=hints[each.name],
                )
                for each in options
            ]
        )
        command.__annotations__ = {each.name: hints[each.name] for each in options}
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        return command

    return decorate


def check_choice(
    models: Sequence[str] = (),
    options: Sequence[str] = (),
    *,
    codecs: Sequence[str] = (),
    algorithms: Sequence[str] = (),
    tiers: Sequence[str] = (),
) -> None:
    """Raise ConfigError for a name or an option that no catalog has, before anything is measured."""
    for model in models:
        check_tiers(check_names(None, FederationOptions(model=model, model_options=options).settings), tiers)
    if not models:  # those measured by default have the same tiers
        check_tiers(check_names(None, {"model.name": "resnet20"}), tiers)
    for codec in codecs:
        check_names(None, {"codec": parse_named(codec, "codec")})
    for algorithm in algorithms:
        if algorithm.partition(":")[0] not in shipped().optimizers:  # FedAvg with this optimizer
            check_names(None, parse_algorithm(algorithm))

"""Shared options of commands: help texts, values, and checks of paths before torch is loaded."""

from __future__ import annotations

import errno
import inspect
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import msgspec
import typer
from typer.core import TyperCommand

from edgefl.errors import ConfigError, DataError
from edgefl.system.sizes import parse_budget, parse_size
from edgefl.wire.enrolment import parse_token
from edgefl.wire.keys import parse_keys
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.address import Address, read_secret
from edgefl.wire.text import describe_unknown


class EngineChoice(StrEnum):
    """Values of --engine, --format and --target."""

    onnx = "onnx"
    executorch = "executorch"


class ActivationsOption(StrEnum):
    """Values of --activations."""

    float32 = "float32"
    float16 = "float16"


class OutputsMode(StrEnum):
    """Values of --outputs."""

    caller = "caller"
    planned = "planned"


Processor = StrEnum("Processor", ["auto", "cpu", "cuda"])
BadRows = StrEnum("BadRows", ["refuse", "skip"])
Sandbox = StrEnum("Sandbox", ["auto", "always", "never"])
BadRowsOption = Annotated[
    BadRows, typer.Option(help="rows that cannot be read or do not fit: refuse the data, or leave them out")
]
Engines = Annotated[
    list[EngineChoice] | None, typer.Option(help="may be repeated; default: those that are installed")
]
LocalData = Annotated[
    Path, typer.Option(help="local data: .npz, folder of arrays, class folders, CSV, JSON lines, text")
]
ModelName = Annotated[str | None, typer.Option(help="a model of `edgefl ls models`, or file.py:factory")]
ModelOptions = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="KEY=VALUE of the model, values as in JSON; may be repeated"),
]
ProcessorOption = Annotated[Processor, typer.Option(help="where to average and evaluate")]
TRACKERS = "Trackers"
Tensorboard = Annotated[
    bool,
    typer.Option(
        "--tensorboard", rich_help_panel=TRACKERS, help="write TensorBoard's event files into --out too"
    ),
]
Mlflow = Annotated[
    str | None,
    typer.Option(metavar="URL", rich_help_panel=TRACKERS, help="send rounds and files to this MLflow too"),
]
Seed = Annotated[int | None, typer.Option(min=0, help="decides weights, partition, batches and noise")]


def help_of(command: Callable[..., None]) -> str:
    """Return the help text of a command from its docstring: paragraphs as one line, examples without blank lines."""
    shown: list[str] = []
    for paragraph in inspect.cleandoc(command.__doc__ or "").split("\n\n"):
        if paragraph.startswith(" "):
            shown[-1] += f"\n{paragraph}"
        else:
            shown.append(" ".join(paragraph.split()))
    return "\n\n".join(shown)


def add_group(app: typer.Typer, name: str, help: str, *commands: Callable[..., None]) -> None:
    """Add the group ``name`` to ``app``, so that ``edgefl NAME COMMAND`` runs one of ``commands``, called by its
    function's name.
    """
    group = typer.Typer(help=help, no_args_is_help=True, rich_markup_mode="rich")
    for command in commands:
        group.command(command.__name__, help=help_of(command))(command)
    app.add_typer(group, name=name)


def address(
    text: str,
    ca_file: str = "",
    cert_file: str = "",
    key_file: str = "",
    password_file: str = "",
    *,
    insecure_password: bool = False,
) -> Address:
    """Return the broker's address from the options of a command.

    Args:
        text: ``host:port`` or a URL.
        ca_file: certificate of the broker's authority; like all options, it replaces a value in ``text``.
        cert_file: client certificate.
        key_file: its private key.
        password_file: file with the password.
        insecure_password: True if the password may be sent without TLS.

    Raises:
        BrokerError: if the address or a file cannot be used.
    """
    parsed = Address.parse(text)
    secret = read_secret(password_file) if password_file else parsed.password
    if parsed.username and not secret:
        secret = os.environ.get("EDGEFL_BROKER_PASSWORD", "")
    found = replace(
        parsed,
        password=secret,
        ca_file=ca_file or parsed.ca_file,
        cert_file=cert_file or parsed.cert_file,
        key_file=key_file or parsed.key_file,
        insecure_password=insecure_password or parsed.insecure_password,
    )
    found.check()
    return found


def checked_key(text: str) -> str:
    """Return ``text`` unchanged if it is empty or lists valid public keys. Used to report an error early.

    Raises:
        ConfigError: if a key cannot be used.
    """
    parse_keys(text)
    return text


def token_text(text: str) -> str:
    """Return the token in ``text``, or in the file FILE if the text is ``@FILE``; "" for "".

    Raises:
        ConfigError: if the file does not exist, or there is no token.
    """
    if not text:
        return ""
    try:
        given = Path(text[1:]).read_text(encoding="utf-8-sig") if text.startswith("@") else text
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {text[1:]}; give one that holds a token") from error
    except OSError as error:
        raise ConfigError(
            f"{text[1:]} cannot be read: {error.strerror}; give a file that holds a token"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{text[1:]} holds no token") from error
    return parse_token(given).text


def parse_limits(entries: list[str]) -> Limits:
    """Return Limits from texts such as ``fetch_window=4``. Others keep their defaults.

    Raises:
        ConfigError: if a limit is unknown or has a bad value; the text names it.
    """
    pairs = dict(entry.partition("=")[::2] for entry in entries)
    if wrong := describe_unknown(pairs, Limits.__struct_fields__):
        raise ConfigError(f"--limit {wrong[0]}; `edgefl validate --template` lists all limits")
    try:
        return msgspec.convert(pairs, Limits, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--limit: {error}; `edgefl validate --template` lists all limits") from error


def parse_bytes(text: str, option: str) -> int:
    """Return a size such as ``64MiB`` or ``64M`` in bytes. ``option``: flag that the error names.

    Raises:
        ConfigError: if the text is no size, or has no unit.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}", option=option) from error


def parse_memory_budget(text: str) -> None:
    """Check the text of a memory budget, a size or a share such as 60%. "" is allowed and means no budget.

    Raises:
        ConfigError: if it is neither a size nor a share.
    """
    try:
        if text:
            parse_budget(text)
    except ValueError as error:
        raise ConfigError(f"--memory-budget: {error}", option="--memory-budget") from error


def _without_password(context: typer.Context, option: typer.CallbackParam, text: str) -> str:
    """Return ``text``, an address, unchanged, unless it has a password and comes from the command line.

    Raises:
        ConfigError: in that case, because all users of the machine can read a command line.
    """
    source = context.get_parameter_source(option.name or "")
    if text and source is not None and source.name == "COMMANDLINE" and Address.parse(text).password:
        raise ConfigError(
            "--broker holds a password, and everybody on this machine can read the arguments of a process: put the address "
            "into EDGEFL_BROKER, the password into EDGEFL_BROKER_PASSWORD, or name a file by --password-file"
        )
    return text


def without_secret(context: typer.Context, option: typer.CallbackParam, text: str) -> str:
    """Return ``text``, a secret, unchanged, unless it comes from the command line and is not the name of a file
    (``@FILE``).

    Raises:
        ConfigError: in that case, because all users of the machine can read a command line.
    """
    source = context.get_parameter_source(option.name or "")
    if text and source is not None and source.name == "COMMANDLINE" and not text.startswith("@"):
        raise ConfigError(
            f"--{option.name} is a secret, and everybody on this machine can read the arguments of a process: put it into "
            f"a file and name that as @FILE, or into {option.envvar}"
        )
    return text


Broker = Annotated[
    str,
    typer.Option(
        envvar="EDGEFL_BROKER",
        callback=_without_password,
        help="host:port of the MQTT broker, or a URL: mqtts://user@host:8883, wss://host/mqtt",
    ),
]
Database = Annotated[
    str,
    typer.Option(
        envvar="EDGEFL_DATABASE",
        help="SQLAlchemy URL of the journal; default: SQLite in the folder of the run",
    ),
]
CaFile = Annotated[str, typer.Option(help="certificate of the broker's authority (PEM); switches TLS on")]
CertFile = Annotated[str, typer.Option(help="client certificate (PEM), for mutual TLS")]
KeyFile = Annotated[str, typer.Option(help="its key (PEM, without a password)")]
PasswordFile = Annotated[
    str, typer.Option(help="file whose first line is the password; or EDGEFL_BROKER_PASSWORD")
]
InsecurePassword = Annotated[
    bool, typer.Option("--insecure-password", help="let the password travel without TLS")
]


Command = Any
"""One of typer's commands; the module of their type differs between releases."""
_ARGUMENT = re.compile(r"`([a-z][a-z_]*)`")


def in_flags(message: str, command: Command, arguments: Sequence[str]) -> str:
    """Return ``message`` with names of arguments (in backquotes) replaced by the flags of the called command.

    Args:
        message: text of an error.
        command: the whole command line.
        arguments: words with which it was called.
    """
    flags = _flags(_find_command(command, arguments))
    return _ARGUMENT.sub(lambda match: flags.get(match[1], match[0]), message)


def _find_command(command: Command, arguments: Sequence[str]) -> Command:
    """Return the innermost command that the words of a command line name."""
    for word in arguments:
        children: dict[str, Command] = getattr(command, "commands", {})
        if word in children:
            command = children[word]
    return command


def _flags(command: Command) -> dict[str, str]:
    """Return the flags of a command by the names of their parameters, and by the flags' own names with underscores."""
    flags: dict[str, str] = {}
    for parameter in command.params:
        longest = max((name for name in parameter.opts if name.startswith("--")), key=len, default="")
        if longest:
            flags[longest[2:].replace("-", "_")] = longest
            flags[str(parameter.name)] = longest
    return flags


_EXAMPLES = "\n\nExamples:"


class ShortHelp(TyperCommand):
    """A command with a short ``--help``: it omits options that belong to a help panel, and all examples but the first
    ones.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        more = [each for each in self.params if getattr(each, "rich_help_panel", None)]
        more = more if any(each.name == "help_all" for each in self.params) else []
        text, examples = self.help or "", ""
        if more:
            first, _, examples = text.partition(_EXAMPLES)
            self.help = first + _EXAMPLES + examples.partition("\n\n")[0] if examples else first
        _show(more, hidden=True)
        try:
            super().format_help(ctx, formatter)
        finally:
            self.help = text
            _show(more, hidden=False)


def _show(options: list[Any], *, hidden: bool) -> None:
    for each in options:
        each.hidden = hidden


def _print_all(ctx: typer.Context, value: bool) -> None:
    if value:
        TyperCommand.format_help(ctx.command, ctx, ctx.make_formatter())  # type: ignore[arg-type]
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", is_eager=True, callback=_print_all, help="Show all options and examples."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from edgefl.system.distribution import NAME, version

        typer.echo(f"{NAME} {version()}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """The options of ``edgefl`` itself."""


def existing(path: Path | None) -> Path | None:
    """Return ``path`` unchanged if it is None or exists.

    Raises:
        DataError: if it does not exist; the text names the most similar file in its folder.
    """
    if path is not None and not path.exists():
        from edgefl.wire.text import similar

        raise DataError(f"there is no file or folder {path}{similar(path)}; correct the path", path=str(path))
    return path


def run_folder(path: Path) -> Path:
    """Return ``path`` unchanged if it is the folder of a run or simulation.

    Raises:
        DataError: if it does not exist.
        ConfigError: if it is another folder.
    """
    existing(path)
    if not any((path / name).is_file() for name in ("run.toml", "config.toml")):
        raise ConfigError(
            f"{path} is not the folder of a run: it has no run.toml; give the --out of `edgefl run` or `edgefl simulate`",
            path=str(path),
        )
    return path


def writable_file(path: Path | None) -> Path | None:
    """Return ``path`` unchanged if it is None, or a file can be written there. Nothing is written.

    Of an existing file or device, such as /dev/stdout, the folder is not checked.

    Raises:
        OSError: if no file can be written there.
    """
    if path is not None:
        if path.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not path.exists():
            _check_writable(path, path.absolute().parent)
        elif not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Return ``path`` unchanged if it is None, or a folder that can be written or created. Nothing is created.

    Raises:
        OSError: if it is not.
    """
    if path is not None:
        _check_writable(path, path.absolute())
    return path


def _check_writable(path: Path, folder: Path) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error

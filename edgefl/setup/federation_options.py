"""Options of commands that replace keys of a federation file, such as ``--codec fedpaq:bits=3``. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from edgefl.errors import ConfigError
from edgefl.facts import shipped

GRAMMAR = "NAME[:KEY=VALUE,...]"
_TEXT = re.compile(r"\s*(?P<name>[^:=,\s]+)\s*(?::(?P<options>.*))?", re.DOTALL)
_OWN = re.compile(r"\s*((?:[^:]*[^:\s]\.py|[^:=,\s]+):[A-Za-z_]\w*)\s*(?::(.*))?", re.DOTALL)
"""An algorithm or a loss of the user's own: ``package.module:factory`` or ``path/to/file.py:factory``, with options or
not."""
_NEXT = re.compile(r",(?=\s*\w+\s*=)")
"""A comma that begins an option: those inside of a value are not followed by a key."""


@dataclass(frozen=True, kw_only=True)
class FederationOptions:
    """Options of a command that replace keys of a federation file. None keeps the key.

    Attributes:
        rounds: rounds to train.
        seed: seed of the federation.
        data: folder with the dataset's standard files.
        download: True to download the dataset if no folder has it.
        model: name of the model.
        model_options: texts ``KEY=VALUE``, options of the model.
        tiers: text that describes all tiers (:mod:`edgefl.setup.tiers`).
        algorithm: ``NAME[:KEY=VALUE,...]`` or ``FILE.py:FACTORY``; the same grammar holds for codec, loss and
            optimizer.
        codec: codec of the updates.
        loss: loss of the training.
        optimizer: optimizer of the server.
        engine: runtime of all devices.
        downlink_encoding: dtype of the weights that devices get.
        broker_kind: kind of broker to start.
        tensorboard: True to write TensorBoard's event files.
        mlflow: URL of an MLflow server that gets the rounds.
        others: texts ``KEY=VALUE`` with a dotted key.
    """

    rounds: int | None = None
    seed: int | None = None
    data: Path | None = None
    download: bool = False
    model: str | None = None
    model_options: Sequence[str] = ()
    tiers: str | None = None
    algorithm: str | None = None
    codec: str | None = None
    loss: str | None = None
    optimizer: str | None = None
    engine: str | None = None
    downlink_encoding: str | None = None
    broker_kind: str | None = None
    tensorboard: bool = False
    mlflow: str | None = None
    others: Sequence[str] = ()

    @property
    def settings(self) -> dict[str, object]:
        """Values by dotted key of the federation file. Options that are not set, tiers and engine are left out.

        Tiers and engine need the model.

        Raises:
            ConfigError: if a text does not follow its grammar, or a key has two values.
        """
        settings: dict[str, object] = {
            "federation.rounds": self.rounds,
            "federation.seed": self.seed,
            "data.dir": str(self.data.resolve()) if self.data else None,
            "data.download": self.download or None,
            "model.name": self.model or None,
            "codec": None if self.codec is None else parse_named(self.codec, "codec"),
            "loss": None if self.loss is None else parse_loss(self.loss),
            "optimizer": None if self.optimizer is None else parse_named(self.optimizer, "optimizer"),
            "downlink.encoding": None if self.downlink_encoding is None else str(self.downlink_encoding),
            "broker.kind": self.broker_kind,
            "tracking.tensorboard": self.tensorboard or None,
            "tracking.mlflow": self.mlflow,
        }
        if self.algorithm is not None:
            settings |= parse_algorithm(self.algorithm)
        options = parse_options(self.model_options)
        settings |= {f"model.options.{name}": value for name, value in options.items()}
        settings = {key: value for key, value in settings.items() if value is not None}
        others = parse_options(self.others, "a setting")
        for key in others:
            if "." not in key:
                raise ConfigError(f"expected TABLE.KEY such as codec.name, found {key!r}", key=key)
            if key in settings or key.partition(".")[0] in settings:
                raise ConfigError(
                    f"expected one value of {key}, found two (of an option and of a setting); leave one out",
                    key=key,
                )
        return settings | others


def parse_options(pairs: Sequence[str], what: str = "a model option") -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as a dictionary. Values are JSON; a value that is no JSON is a string.

    Args:
        pairs: the texts.
        what: name of such a text, for the error.

    Raises:
        ConfigError: if a text has no key or no value, a value is null, or a key has two values.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"{what} is KEY=VALUE, found {pair!r}")
        if key in options:
            raise ConfigError(f"expected one value of {key}, found two; leave one out", key=key)
        options[key] = _value(key, value)
    return options


def parse_named(text: str, what: str) -> dict[str, Any]:
    """Return a dictionary with ``name`` and ``options`` from ``NAME:KEY=VALUE,...``, without checking them.

    Args:
        text: the text. Values are JSON; a value that is no JSON is a string.
        what: kind of choice for errors, such as "codec".

    Raises:
        ConfigError: the text does not follow the grammar.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(f"cannot read the {what} {text!r}; a {what} is {GRAMMAR}", **{what: text})
    options: dict[str, Any] = {}
    for item in _NEXT.split(match["options"] or "") if match["options"] is not None else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value or key in options:
            raise ConfigError(
                f"cannot read {item.strip()!r} of the {what} {text!r}; a {what} is {GRAMMAR}", **{what: text}
            )
        options[key] = _value(key, value)
    return {"name": match["name"], "options": options}


def parse_algorithm(text: str) -> dict[str, Any]:
    """Return keys of the table ``algorithm`` by dotted name, from ``name:lr=0.1,alpha=0.03``.

    Raises:
        ConfigError: if the text does not follow the grammar.
    """
    algorithm = _named_or_own(text, "algorithm", shipped().algorithms)
    if "name" in algorithm["options"]:
        raise ConfigError(
            f"expected options of an algorithm, found name in {text!r}; leave it out", algorithm=text
        )
    options_by_key = {f"algorithm.{key}": value for key, value in algorithm["options"].items()}
    return {"algorithm.name": algorithm["name"], **options_by_key}


def parse_loss(text: str) -> dict[str, Any]:
    """Return ``name`` and ``options`` of the table ``loss``, from ``huber:delta=2`` or ``path/to/file.py:function``.

    Raises:
        ConfigError: if the text does not follow the grammar.
    """
    return _named_or_own(text, "loss", shipped().losses)


def _named_or_own(text: str, what: str, known: Collection[str]) -> dict[str, Any]:
    """Return ``name`` and ``options`` from ``NAME:KEY=VALUE,...`` with a name in ``known``, or from ``FILE.py:FACTORY``
    of the user.

    ``what``: kind of choice for errors, such as "loss".
    """
    own = None if text.partition(":")[0].strip() in known else _OWN.fullmatch(text)
    if own is None:
        return parse_named(text, what)
    name, options = own.groups()
    return parse_named("own" if options is None else f"own:{options}", what) | {"name": name}


def _value(key: str, text: str) -> Any:
    """Return the value in a text as JSON, or the text itself if it is no JSON. ConfigError for null."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
    if value is None:
        raise ConfigError(f"expected a value of {key}, found null; leave it out for its default", key=key)
    return value

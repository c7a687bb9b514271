"""Federations as Python objects, which correspond one to one to federation files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.api.model import Model
from edgefl.api.training import Training, checked_argument
from edgefl.config import DataTable, Federation, load, parse
from edgefl.config.tables import Activations, ConfigTable
from edgefl.contract.choice import SubmodelChoice, as_choice
from edgefl.errors import ConfigError
from edgefl.models.user_factory import absolute, address_of
from edgefl.setup.data import data_table
from edgefl.setup.federation_options import FederationOptions
from edgefl.setup.tiers import completed, parse_tiers
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.limits import check_seed

_OWN_KEYS: tuple[str, ...] = ("gamma", "cut", "chunks")
"""Options of a submodel that stand in the tier's table itself."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Class of devices of equal capacity.

    Attributes:
        submodel: Submodel that the devices hold and train; by default the whole model.
        count: Number of devices that :func:`edgefl.run` starts.
        devices: Patterns of the names of its devices (``weak-*``); by default all names that begin with the
            tier's name.
        memory_bytes: Memory that a device must report to get this tier; 0 for no such rule.
        memory_budget: Peak of training above the idle process, like ``64MiB`` or ``60%``.
        activations: Type in which values for the backward pass are stored (:func:`edgefl.compile`).
        engine: Runtime of these devices.
    """

    submodel: SubmodelChoice | str | None = None
    count: int = 1
    devices: tuple[str, ...] = ()
    memory_bytes: int = 0
    memory_budget: str = ""
    activations: Activations = "float32"
    engine: FormatName = "onnx"

    @property
    def table(self) -> dict[str, Any]:
        """The tier as keys of a table ``[tiers.NAME]`` in a federation file; without a submodel, its keys are left out."""
        others = {
            "count": self.count,
            "devices": self.devices,
            "memory_bytes": self.memory_bytes,
            "memory_budget": self.memory_budget,
            "activations": self.activations,
            "engine": self.engine,
        }
        if self.submodel is None:
            return others
        submodel = as_choice("submodel", SubmodelChoice, self.submodel)
        options = dict(submodel.options)
        own: dict[str, Any] = {name: options.pop(name) for name in _OWN_KEYS if name in options}
        return {"kind": submodel.name, **own, "options": options, **others}


def federation(
    model: Model | str | Callable[..., Any] = "resnet8",
    *,
    name: str = "demo",
    rounds: int = 10,
    seed: int = 0,
    tiers: Mapping[str, Tier] | None = None,
    training: Training = Training(),
    data: DataTable | str | Path | None = None,
    tables: Mapping[str, ConfigTable | Mapping[str, Any]] | None = None,
) -> Federation:
    """Describe a federation: its model, tiers, training and data.

    Other processes read it as text, so a model or an algorithm of your own is a function at the top level of a file.

    Args:
        model: a model's name, ``file.py:factory``, or a factory: a function that returns an ``nn.Module``; as a
            :class:`edgefl.Model` with options of the factory and the output that is trained.
        name: name of the federation; part of every MQTT topic.
        rounds: number of rounds to train.
        seed: seed of initial weights, partition, batches and noise.
        tiers: tiers by name. By default, a run on one machine has the model's own tiers, with two devices each. A
            :class:`edgefl.Server`, whose devices are elsewhere, has one tier ``strong`` with the whole model.
        training: algorithm, codec, optimizer and loss.
        data: the name of a dataset (``digits``), a file that :meth:`edgefl.data.Dataset.save` wrote, a
            CSV or JSON lines with the column ``label``, or a :class:`edgefl.config.DataTable`.
        tables: other tables of a federation file by name, as objects of :mod:`edgefl.config` or plain keys:
            ``{"round": edgefl.config.RoundTable(fraction=0.1), "server": {"workers": 2}}``.

    Raises:
        ConfigError: a value cannot be used; the text lists every such key with its expected value.

    >>> half = edgefl.Tier(submodel=edgefl.submodels.Width(gamma=0.5))
    >>> halves = edgefl.federation("mlp", rounds=2, tiers={"half": half})
    >>> halves.tiers["half"].gamma
    0.5
    """
    made = Model.of(model)
    if given := [key for key in ("sample", "classes") if getattr(made, key) is not None] + ["seed"] * (
        made.seed != 0
    ):
        raise ConfigError(
            f"expected a model without `{given[0]}`: a federation's data say the shapes, and `seed` of the federation the "
            "initial weights; leave it out",
            argument=given[0],
        )
    factory = made.factory if isinstance(made.factory, str) else address_of(made.factory, "a model")  # type: ignore[arg-type]
    own: dict[str, Any] = {
        "federation": {"name": name, "rounds": rounds, "seed": seed},
        "model": {"name": absolute(factory), "options": dict(made.options or {}), "output": made.output},
        "tiers": {tier: _tier(tier, each).table for tier, each in (tiers or {}).items()},
        **checked_argument("training", Training, training).tables,
    }
    if data is not None:
        own["data"] = _settings(data) if isinstance(data, DataTable) else data_table(data)
    for key, table in (tables or {}).items():
        if not isinstance(table, ConfigTable | Mapping):
            raise ConfigError(
                f"argument `tables` has {table!r} for {key!r}; give an object of edgefl.config, or its keys",
                argument="tables",
            )
        own[key] = own.get(key, {}) | (_settings(table) if isinstance(table, ConfigTable) else dict(table))
    return parse(own, source="the federation")


def _tier(name: str, value: object) -> Tier:
    if not isinstance(value, Tier):
        raise ConfigError(
            f"argument `tiers` has {value!r} for {name!r}; give edgefl.Tier(submodel=..., count=...)",
            argument="tiers",
        )
    return value


def _settings(table: ConfigTable) -> dict[str, Any]:
    """Return the keys of ``table`` that were set explicitly.

    An omitted key differs from one that was set to the default value: some defaults depend on other keys.
    """
    return table.model_dump(exclude_unset=True)


def load_federation(
    path: str | Path | None = None, settings: Mapping[str, object] | None = None
) -> Federation:
    """Return the federation in a file.

    Args:
        path: TOML file; None: the defaults.
        settings: values by dotted key that replace those of the file (``{"algorithm.lr": 0.1}``).

    Raises:
        ConfigError: the file or a setting cannot be used; the text lists every problem.
    """
    return load(None if path is None else Path(path), settings)


def federation_of(
    source: Federation | str | Path | None, *, data: str | Path | None = None, seed: int | None = None
) -> Federation:
    """Return ``source`` as a federation, with a folder of data and a seed of the caller.

    Args:
        source: a federation, which is not changed, its file, or None for the demo.
        data: folder with the dataset's standard files, which replaces the federation's.
        seed: seed that replaces the federation's.

    Raises:
        ConfigError: the file or a value cannot be used.
    """
    settings: dict[str, object] = {} if seed is None else {"federation.seed": check_seed(seed)}
    settings |= {"data.dir": str(Path(data).resolve())} if data else {}
    if not isinstance(source, Federation):
        return demo_federation(settings) if source is None else load_federation(source, settings)
    tables = {}
    for key, value in settings.items():
        table, _, name = key.partition(".")
        tables[table] = getattr(source, table).model_copy(update={name: value})
    return source.model_copy(update=tables)


def demo_federation(settings: Mapping[str, Any] | None = None) -> Federation:
    """Return the federation that `edgefl run` trains without a file. ``settings`` replace its values by dotted key.

    Raises:
        ConfigError: a setting cannot be used.
    """
    return load(None, with_demo_defaults(settings or {}))


def with_options(config: Path | None, options: FederationOptions) -> Federation:
    """Return the federation of a file, or the demo, with options of the command line.

    Args:
        config: file of the federation; None: the demo.
        options: options that replace its values. Of these, ``tiers`` replaces all tiers, and ``engine`` is set in each
            tier.

    Raises:
        ConfigError: the file or an option cannot be used; it names every problem.
    """

    def read(settings: Mapping[str, object]) -> Federation:
        return load_federation(config, settings) if config else demo_federation(settings)

    settings = options.settings
    federation = read(settings)
    if options.tiers is not None:
        federation = read(settings | {"tiers": parse_tiers(options.tiers, federation.model.name)})
    if options.engine is None:
        return federation
    whole = completed(federation)
    tiers = {
        name: table.model_copy(update={"engine": str(options.engine)}) for name, table in whole.tiers.items()
    }
    return whole.model_copy(update={"tiers": tiers})


_SGD_RATE = 0.05
"""Learning rate of algorithms that take SGD's steps, by default."""

_META = frozenset({"per_fedavg", "fedavg_update", "fedavg_matched"})
"""Algorithms whose default rate is the paper's, for a thousand rounds."""

_DEMO_ROUNDS = 10
_DEMO_STEPS = 20
"""Local steps of a round: twice those of a file, because a round of so small a model is mostly its messages.

FedBAT also learns step sizes in half of them (fedbat.md 9).
"""


_DEMO_CODEC_OPTIONS: dict[str, dict[str, object]] = {"fedbat": {"phi": 0.8}}
"""Codec options for few steps: half of 20 in full precision cost FedBAT a point (the paper has 50 steps and more)."""


def with_demo_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted key, such as ``federation.rounds``: those of ``chosen``, and the demo's values for the
    rest.

    ``chosen`` may have the table ``codec`` as a mapping with ``name`` and ``options``; the result has its keys.
    """
    model = str(chosen.get("model.name", "resnet8"))
    codec = chosen.get("codec", {"name": "dense", "options": {}})
    of_few_steps = _DEMO_CODEC_OPTIONS.get(chosen.get("codec.name", codec["name"]), {})
    codec_options = {
        f"codec.options.{name}": value for name, value in (of_few_steps | codec["options"]).items()
    }
    # Plain SGD, with which some local training begins, is not through in so few rounds.
    momentum = {} if "algorithm.name" in chosen else {"algorithm.momentum": 0.9}
    defaults: dict[str, Any] = momentum | {
        "federation.rounds": _DEMO_ROUNDS,
        "algorithm.steps": _DEMO_STEPS,
        "algorithm.lr": _learning_rate(str(chosen.get("algorithm.name", "sgd")), model),
        "data.train_samples": 6000,
        "data.test_samples": 2000,
        "data.alpha": 1.0,
        "round.lr_decay_at": (0.6,),
        "codec.name": codec["name"],
    }
    return defaults | codec_options | {key: value for key, value in chosen.items() if key != "codec"}


def _learning_rate(algorithm: str, model: str) -> float:
    """Return the demo's learning rate for an algorithm and a model, both by name.

    It is the algorithm's default if that differs from plain SGD's; else 0.1 for ResNets and 0.02 for other models.
    """
    from edgefl.algorithms.catalog import ALGORITHMS

    factory = ALGORITHMS.get(algorithm)
    own = inspect.signature(factory).parameters.get("lr") if factory else None
    if own is not None and own.default not in (inspect.Parameter.empty, _SGD_RATE) and algorithm not in _META:
        return float(own.default)
    # Batch norm bears a large step; models without it do not.
    return 0.1 if model.startswith("resnet") else 0.02

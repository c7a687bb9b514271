"""A federation as objects: the same as its file, which is these objects as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.api.choices import codec_choice, loss_choice
from edgefl.config import DataTable, Federation, load, parse
from edgefl.config.broker import BrokerTable
from edgefl.config.choices import Activations
from edgefl.config.rounds import AggregateTable, DownlinkTable, RoundTable
from edgefl.config.selection import SelectionTable
from edgefl.config.tables import (
    ExportTable,
    Table,
)
from edgefl.contract.choice import (
    AlgorithmChoice,
    Choice,
    CodecChoice,
    OptimizerChoice,
    SubmodelChoice,
    chosen,
)
from edgefl.lab.demo import with_demo_defaults
from edgefl.losses import LossLike
from edgefl.models.user_factory import absolute, address_of
from edgefl.optimizers.catalog import NONE
from edgefl.setup.data import data_table
from edgefl.wire.bundle.formats import FormatName
from edgefl.wire.errors import ConfigError

_OWN_KEYS: tuple[str, ...] = ("gamma", "cut", "chunks")
"""Options of a submodel that stand in the tier's table itself."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """A class of devices of equal capacity. ``submodel``: what they hold and train; by default the whole model.

    ``count`` is how many :func:`edgefl.run` starts. ``devices`` are patterns of the names that belong here (``weak-*``;
    default: those that begin with the tier's name), or ``memory_bytes`` is what a device must report. ``memory_budget`` is
    the peak of training over the idle process, like ``64MiB`` or ``60%``; ``activations`` is how values wait for the
    backward pass (:func:`edgefl.compile`); ``engine`` what these devices run graphs with.
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
        """The tier's table in a federation file."""
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
        submodel = chosen("submodel", SubmodelChoice, self.submodel)
        options = dict(submodel.options)
        own: dict[str, Any] = {name: options.pop(name) for name in _OWN_KEYS if name in options}
        return {"kind": submodel.name, **own, "options": options, **others}


def federation(
    model: str | Callable[..., Any] = "resnet8",
    *,
    name: str = "demo",
    rounds: int = 10,
    seed: int = 0,
    tiers: Mapping[str, Tier] | None = None,
    loss: LossLike | None = None,
    algorithm: AlgorithmChoice | str | None = None,
    codec: CodecChoice | AlgorithmChoice | str | None = None,
    optimizer: OptimizerChoice | str | None = None,
    data: DataTable | str | Path | None = None,
    round: RoundTable | None = None,
    selection: SelectionTable | None = None,
    aggregate: AggregateTable | None = None,
    downlink: DownlinkTable | None = None,
    broker: BrokerTable | None = None,
    export: ExportTable | None = None,
    limits: Mapping[str, float] | None = None,
    simulation: Mapping[str, Any] | None = None,
    server: Mapping[str, Any] | None = None,
    bn: str = "global",
    options: Mapping[str, Any] | None = None,
    output: str | int | None = None,
) -> Federation:
    """Who trains what together, and how. Other processes read it as text, so a model or an algorithm of your own is a
    function at the top level of a file.

    Args:
        model: a model's name, ``file.py:factory``, or a factory: a function that returns an ``nn.Module``.
        name: of the federation; part of every MQTT topic.
        rounds: to train.
        seed: decides initial weights, partition, batches and noise.
        tiers: by name; by default the model's own, two devices each, for a run on one machine, and one tier ``strong``, the
            whole model, for a :class:`edgefl.Server`: which devices there are elsewhere is for its owner to say.
        loss: what training minimises: a choice such as ``edgefl.losses.Huber(delta=2.0)``, its name, or a function of
        your own,
            ``(out, y)`` -> one loss per sample; by default the model's own, or the one that fits its output and the labels.
        algorithm: the local training; by default SGD.
        codec: how updates become bytes; by default float32 weights.
        optimizer: the server's; by default what the algorithm says.
        data: the name of a dataset (``digits``), a file that :meth:`edgefl.data.Dataset.save` wrote, a
            CSV or JSON lines with the column ``label``, or a :class:`edgefl.config.DataTable`.
        round: when a round starts, how many devices it selects and when it ends.
        selection: which devices a round may select, and how.
        aggregate: how the updates become one change.
        downlink: how weights travel to the devices.
        broker: the MQTT broker.
        export: formats of the bundles.
        limits: timeouts and sizes, any of :class:`edgefl.wire.limits.Limits`.
        simulation: what :func:`simulate` adds, keys of the table ``[simulation]`` such as ``step_ms`` and ``tensorboard``.
        server: which processes take updates, keys of the table ``[server]`` such as ``workers``.
        bn: batch norm of models that have a mode: ``global`` or ``static``.
        options: keyword arguments of the model's factory.
        output: which of the things that a model of your own returns is its output, as :func:`edgefl.compile` takes it.

    Raises:
        ConfigError: with every key that cannot be used, and what it should be.

    >>> halves = edgefl.federation("mlp", rounds=2, tiers={"half": edgefl.Tier(submodel=edgefl.submodels.Width(gamma=0.5))})
    >>> halves.tiers["half"].gamma
    0.5
    """
    name_of_model = model if isinstance(model, str) else address_of(model, "a model")
    tables: dict[str, Any] = {
        "federation": {"name": name, "rounds": rounds, "seed": seed},
        "model": {
            "name": absolute(name_of_model),
            "bn": bn,
            "options": dict(options or {}),
            "output": output,
        },
        "tiers": {tier: _tier(tier, each).table for tier, each in (tiers or {}).items()},
        "limits": dict(limits or {}),
        "simulation": dict(simulation or {}),
        "server": dict(server or {}),
    }
    if loss is not None:
        named_loss = loss_choice(loss)
        tables["loss"] = {"name": absolute(named_loss.name), "options": dict(named_loss.options)}
    if algorithm is not None:
        algorithm = chosen("algorithm", AlgorithmChoice, algorithm)
        tables["algorithm"] = {"name": absolute(algorithm.name), **algorithm.options}
    if codec is not None:
        tables["codec"] = _named(codec_choice(codec))
    if optimizer is not None:
        tables["optimizer"] = _named(chosen("optimizer", OptimizerChoice, optimizer))
    if data is not None:
        tables["data"] = _settings(data) if isinstance(data, DataTable) else data_table(data)
    given = {
        "round": round,
        "selection": selection,
        "aggregate": aggregate,
        "downlink": downlink,
        "broker": broker,
        "export": export,
    }
    tables |= {key: _settings(table) for key, table in given.items() if table is not None}
    return parse(tables, source="the federation")


def _tier(name: str, value: object) -> Tier:
    if not isinstance(value, Tier):
        raise ConfigError(
            f"argument `tiers` has {value!r} for {name!r}; give edgefl.Tier(submodel=..., count=...)",
            argument="tiers",
        )
    return value


def _named(choice: Choice) -> dict[str, Any]:
    return {"name": choice.name, "options": dict(choice.options)}


def _settings(table: Table) -> dict[str, Any]:
    """The keys that were given: those that were not have another meaning than their defaults to some."""
    return table.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class Training:
    """What the tables of a federation say about the training, as the objects that :func:`edgefl.compile` takes."""

    algorithm: AlgorithmChoice
    codec: CodecChoice
    optimizer: OptimizerChoice | None

    @classmethod
    def of(cls, federation: Federation) -> Training:
        table, codec, optimizer = federation.algorithm, federation.codec, federation.optimizer
        return cls(
            AlgorithmChoice(table.name, table.arguments),
            CodecChoice(codec.name, codec.options),
            None if optimizer.name == NONE else OptimizerChoice(optimizer.name, optimizer.options),
        )


def load_federation(
    path: str | Path | None = None, settings: Mapping[str, object] | None = None
) -> Federation:
    """The federation in the file ``path`` (None: the defaults), with ``settings`` by dotted key over it
    (``{"algorithm.lr": 0.1}``).

    ConfigError lists every problem.
    """
    return load(None if path is None else Path(path), settings)


def demo_federation(settings: Mapping[str, Any] | None = None) -> Federation:
    """What `edgefl run` trains without a file, with ``settings`` by dotted key over it."""
    return load(None, with_demo_defaults(settings or {}))

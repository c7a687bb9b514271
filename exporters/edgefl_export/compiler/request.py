"""Requests to the compiler: one exchange of a tier and all else that decides its bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

import torch

from edgefl.algorithms.submodels.frozen_forward import chunk_forward
from edgefl.contract import server_state
from edgefl.contract.algorithm import Algorithm, Function
from edgefl.contract.tensors import Tensors, TensorSpec
from edgefl.errors import ConfigError, ExportError
from edgefl.models.layers.log_mel import LogMel
from edgefl.models.spec import ModelSpec
from edgefl.submodels.submodel import Submodel
from edgefl.system.structs import digest_of
from edgefl.wire.bundle.manifest import DataSpec, Split
from edgefl.wire.bundle.readers import SoundSpec
from edgefl.wire.limits import Limits
from edgefl_export.capture.trace import TraceCache
from edgefl_export.compiler.algorithm import state_read
from edgefl_export.compiler.cache import source_digest
from edgefl_export.memory.recompute import Budget
from edgefl_export.target import Target

FEATURES = "features"
"""Name of the graph that makes samples of sounds."""
FORWARD_BATCH = 32
"""Rows per group in a frozen forward pass (EmbracingFL Algorithm 1, b)."""
_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime")
"""Packages that trace, write and check the graphs. A target's own packages are its version."""


@dataclass(frozen=True)
class ChunkForward:
    """Chunk of a tier's frozen units: names of the units, and the function of their forward pass."""

    units: tuple[str, ...]
    forward: Function


@dataclass(frozen=True)
class Exchange:
    """One exchange (round trip between server and devices) of an algorithm; most algorithms have only one.

    Attributes:
        name: name of the exchange in files and messages; empty for the main one.
        algorithm: functions of the exchange.
        reads: names of the server states, such as control variates, that devices download for it.
        fetched: names of further blobs that devices download for it.
        prefix: chunks of frozen units before the trained units; None for those of the tier.
    """

    name: str
    algorithm: Algorithm
    reads: tuple[str, ...]
    fetched: tuple[str, ...] = ()
    prefix: tuple[ChunkForward, ...] | None = None


@dataclass(frozen=True)
class TierTraining:
    """Local training of one tier: a submodel and the algorithm that trains it.

    Attributes:
        name: name of the tier.
        submodel: part of the model that the tier trains.
        algorithm: its functions: start, training steps and finish.
    """

    name: str
    submodel: Submodel
    algorithm: Algorithm

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges (round trips between server and devices) of the algorithm; the main one is the last
        (:func:`exchanges_of`).
        """
        return exchanges_of(self.algorithm)

    @property
    def main(self) -> Exchange:
        """Main exchange (round trip): the last one, and the only one of most algorithms."""
        return self.exchanges[-1]

    def exchange(self, name: str) -> Exchange:
        """Return the exchange (round trip of the algorithm) called ``name``.

        Raises:
            ConfigError: if the algorithm has none of that name.
        """
        for exchange in self.exchanges:
            if exchange.name == name:
                return exchange
        names = ", ".join(repr(exchange.name) for exchange in self.exchanges)
        raise ConfigError(
            f"algorithm {self.algorithm.name!r} has no exchange {name!r}, but {names}",
            algorithm=self.algorithm.name,
            exchange=name,
        )

    @cached_property
    def prefix(self) -> tuple[ChunkForward, ...]:
        """Chunks of frozen units before the trained units, in order; empty if the submodel has none."""
        return tuple(
            ChunkForward(chunk.units, chunk_forward(chunk.module, chunk.sample, batch=FORWARD_BATCH))
            for chunk in self.submodel.prefix
        )

    def prefix_of(self, exchange: Exchange) -> tuple[ChunkForward, ...]:
        """Return the chunks of frozen units that run before the ``exchange`` (round trip of the algorithm), in order."""
        return self.prefix if exchange.prefix is None else exchange.prefix

    def blobs_to_fetch(self, exchange: Exchange) -> tuple[str, ...]:
        """Return the names of the blobs that devices of this tier download for ``exchange`` (:func:`blobs_to_fetch`)."""
        return (*blobs_to_fetch(self.submodel, self.name, exchange.reads), *exchange.fetched)

    def request(
        self,
        exchange: Exchange,
        *,
        model: str,
        data: DataSpec,
        chunk_bytes: int = Limits().chunk_bytes,
        memory_budget: Budget | None = None,
        tokenizer: bytes = b"",
        split: Split | None = None,
    ) -> CompileRequest:
        """Return the request to compile ``exchange`` (one of :attr:`exchanges`) for this tier.

        Args:
            exchange: functions to compile.
            model: name of the model in the manifest.
            data: shape, dtype and reader of the samples.
            chunk_bytes: chunk size of the blobs in bytes.
            memory_budget: limit for the memory of a training step; None for no limit.
            tokenizer: tokenizer of texts as JSON, for data with a text reader; empty otherwise.
        """
        return CompileRequest(
            model=model,
            tier=self.name,
            algorithm=exchange.algorithm,
            units=self.blobs_to_fetch(exchange),
            data=data,
            prefix=self.prefix_of(exchange),
            exchange=exchange.name,
            chunk_bytes=chunk_bytes,
            memory_budget=memory_budget,
            tokenizer=tokenizer,
            split=split,
        )


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """Request to compile one exchange of a tier: all settings that decide the bytes of the bundle.

    Attributes:
        model: name of the model; only readers of the manifest need it.
        tier: name of the tier.
        algorithm: functions of the exchange.
        units: names of the blobs that devices download to train (:func:`blobs_to_fetch`).
        data: shape, dtype and reader of the samples.
        prefix: chunks of frozen units before the trained units.
        exchange: name of the exchange; empty for the main one.
        chunk_bytes: chunk size of the blobs in bytes.
        memory_budget: limit for the memory of a training step; None for no limit. Steps recompute values, and pass some
            through files, until they fit.
        tokenizer: tokenizer of texts as JSON, for data with a text reader; empty otherwise.
        split: division of a device's rows, and the part that it uses; None for all rows.
    """

    model: str
    tier: str
    algorithm: Algorithm
    units: tuple[str, ...]
    data: DataSpec
    prefix: tuple[ChunkForward, ...] = ()
    exchange: str = ""
    chunk_bytes: int = Limits().chunk_bytes
    memory_budget: Budget | None = None
    tokenizer: bytes = b""
    split: Split | None = None

    @property
    def steps(self) -> frozenset[str]:
        """Names of the training steps, to which the memory budget applies."""
        return frozenset(function.name for phase in self.algorithm.phases for function in phase.functions)

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """Functions to compile by the name of their graph, in the order of the manifest. Phases may share a function.

        Raises:
            ExportError: if two functions have the same name, or if log-mel features have another shape than the samples.
        """
        functions = {f"forward.{number}": chunk.forward for number, chunk in enumerate(self.prefix, 1)}
        for function in self.algorithm.functions:
            if functions.setdefault(function.name, function) is not function:
                raise ExportError(
                    f"algorithm {self.algorithm.name!r} has two functions named {function.name!r}; give each its own name",
                    algorithm=self.algorithm.name,
                    function=function.name,
                )
        features = features_of(self.data)
        return functions | ({FEATURES: features} if features else {})

    def fingerprint(self, target: Target, traces: TraceCache) -> str:
        """Return the digest of everything that decides the bundle of this request: the key of the bundle cache.

        Models, submodels, algorithms and codecs enter by the graphs of their functions, which are traced here.

        Args:
            target: format of the bundle.
            traces: receives the traced functions, so that the compiler need not trace them again.

        Raises:
            ExportError: if a function cannot be traced.
        """
        algorithm = self.algorithm
        distinct = {id(function): function for function in algorithm.functions}.values()
        return digest_of(
            {
                "source": source_digest(),
                "packages": {name: _version(name) for name in _PACKAGES},
                "format": [target.name, target.version],
                "label": [self.model, self.tier, self.exchange],
                "data": self.data,
                "tokenizer": hashlib.sha256(self.tokenizer).hexdigest(),
                "chunk_bytes": self.chunk_bytes,
                "memory_budget": self.memory_budget,
                "prefix": [[chunk.units, traces.fingerprint(chunk.forward)] for chunk in self.prefix],
                "fetched": self.units,
                "algorithm": {
                    "name": algorithm.name,
                    "functions": [traces.fingerprint(function) for function in distinct],
                    "activations": [function.activations for function in distinct],
                    "start": algorithm.start.name,
                    "phases": [
                        [phase.name, phase.function.name, phase.steps, phase.over_data, list(phase.shorter)]
                        for phase in algorithm.phases
                    ],
                    "finish": algorithm.finish.name,
                    "evaluate": algorithm.evaluate.name,
                    "personalize": algorithm.personalize.name if algorithm.personalize else "",
                    "hyper": dict(algorithm.hyper),
                    "form": algorithm.form,
                    "masks": dict(algorithm.masks),
                    "draws": algorithm.draws,
                    "carry": algorithm.carry_rule,
                },
                **({} if self.split is None else {"split": self.split}),
            }
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def features_of(data: DataSpec) -> Function | None:
    """Return the function that computes log-mel features of a sound, or None if the reader of ``data`` has none.

    The function maps ``batch.0.x`` float32 (1, length), one sound, to ``record.x`` (1, *data.shape).

    Raises:
        ExportError: if the features have another shape than samples of ``data``.
    """
    reader = data.reader
    if not isinstance(reader, SoundSpec) or not reader.mels:
        return None
    layer = LogMel.of(reader)

    def features(tensors: Tensors) -> Tensors:
        return {"record.x": layer(tensors["batch.0.x"])}

    shape = tuple(layer(torch.zeros(1, reader.length)).shape[1:])
    if shape != data.shape:
        raise ExportError(
            f"the data have samples of shape {data.shape}, and the log-mel features of their reader {shape}: make the "
            "samples of the dataset by edgefl.models.LogMel with the same numbers",
            found=data.shape,
            expected=shape,
        )
    return Function(FEATURES, features, {"batch.0.x": TensorSpec((1, reader.length))}, fixed=True)


def exchanges_of(method: Algorithm) -> tuple[Exchange, ...]:
    """Return all exchanges (round trips) of an algorithm in the order in which they first run; the main one is the last."""
    names = exchange_names(len(method.opening), len(method.ahead))
    return tuple(
        Exchange(name, algorithm, state_read(algorithm, method.server_state))
        for name, algorithm in zip(names, method.exchanges, strict=True)
    )


def exchange_names(opening: int, ahead: int) -> tuple[str, ...]:
    """Return the names of the exchanges (round trips) of an algorithm: ``opening``, then ``ahead``, then "" for the
    main one.

    Several of a kind are numbered, such as ``ahead-1``.

    Args:
        opening: number of exchanges that run once, before the first main one.
        ahead: number of exchanges that run before each main one.
    """
    return (*_numbered("opening", opening), *_numbered("ahead", ahead), "")


def _numbered(word: str, count: int) -> list[str]:
    return [word] if count == 1 else [f"{word}-{number}" for number in range(1, count + 1)]


def blobs_to_fetch(submodel: Submodel, tier: str, reads: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the blobs that a device downloads to train: its weights, then the server states.

    Args:
        submodel: the submodel. If it consists of whole units, tiers share these blobs; else the tier has its own blobs.
        tier: name of the tier; prefix of its own blobs.
        reads: names of the server states that the exchange reads.
    """
    if not submodel.units:
        own = f"{tier}/submodel"
        return (own, *(f"{own}/{name}" for name in reads))
    return (*submodel.units, *server_state.units_of(reads, submodel.units, trained_names(submodel.spec)))


def trained_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the model's parameters with ``requires_grad``. Server state has one tensor for each."""
    named = spec.module.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in named if parameter.requires_grad)

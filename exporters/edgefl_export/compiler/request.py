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
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import SoundReader
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
    """Forward pass of frozen units of a tier that run together."""

    units: tuple[str, ...]
    forward: Function


@dataclass(frozen=True)
class Exchange:
    """One exchange of a method.

    Attributes:
        name: its name in files and for people; empty for the main one.
        algorithm: its functions.
        reads: names of the server's states that devices download for it.
    """

    name: str
    algorithm: Algorithm
    reads: tuple[str, ...]


@dataclass(frozen=True)
class TierTraining:
    """Local training of one tier: a submodel and the algorithm that trains it."""

    name: str
    submodel: Submodel
    algorithm: Algorithm

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """All exchanges of the algorithm (:func:`exchanges_of`)."""
        return exchanges_of(self.algorithm)

    @property
    def main(self) -> Exchange:
        """The exchange that a method of one exchange has in every round."""
        return self.exchanges[-1]

    def exchange(self, name: str) -> Exchange:
        """Return the exchange of that name; ConfigError if the algorithm has none."""
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
        """The frozen chunks, each with the function of its forward pass."""
        return tuple(
            ChunkForward(chunk.units, chunk_forward(chunk.module, chunk.sample, batch=FORWARD_BATCH))
            for chunk in self.submodel.prefix
        )

    def fetched(self, exchange: Exchange) -> tuple[str, ...]:
        """Return the names of the blobs that devices download for an exchange (:func:`fetched`)."""
        return fetched(self.submodel, self.name, exchange.reads)

    def request(
        self,
        exchange: Exchange,
        *,
        model: str,
        data: DataSpec,
        chunk_bytes: int = Limits().chunk_bytes,
        memory_budget: Budget | None = None,
        tokenizer: bytes = b"",
    ) -> CompileRequest:
        """Return the request to compile one exchange of this tier; arguments as of :class:`CompileRequest`."""
        return CompileRequest(
            model=model,
            tier=self.name,
            algorithm=exchange.algorithm,
            units=self.fetched(exchange),
            data=data,
            prefix=self.prefix,
            exchange=exchange.name,
            chunk_bytes=chunk_bytes,
            memory_budget=memory_budget,
            tokenizer=tokenizer,
        )


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """One exchange of a tier for samples like ``data``, and all else that decides the bytes of its bundle.

    Attributes:
        model: the model's name, for people who read the manifest.
        tier: the tier's name.
        algorithm: the functions of the exchange.
        units: names of the blobs that devices download to train: units, or the tier's own payload, and server state.
        data: shape, dtype and reader of samples.
        prefix: the frozen chunks before the trained units.
        exchange: the exchange's name; empty for the main one.
        chunk_bytes: chunk size of the blobs.
        memory_budget: bound of a training step's memory; steps recompute and page until they fit.
        tokenizer: the tokenizer of texts as JSON, for data whose reader is of text.
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

    @property
    def steps(self) -> frozenset[str]:
        """Names of the training steps, to which the memory budget applies."""
        return frozenset(function.name for phase in self.algorithm.phases for function in phase.functions)

    @cached_property
    def functions(self) -> Mapping[str, Function]:
        """The functions by the name of their graph, in the order of the manifest.

        Phases may share a function. ExportError if two functions share a name, or for features of another shape than
        samples.
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
        """Return the digest of all that decides the bundle of this request in the format of ``target``.

        Models, submodels, algorithms and codecs count as the graphs of their functions: other code with the same options has
        another digest only if it computes something else. ``traces`` keeps the graphs for the compiler.

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
            }
        )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def features_of(data: DataSpec) -> Function | None:
    """Return the function that makes samples of sounds, or None if the reader of ``data`` asks for no features.

    It maps ``batch.0.x`` float32 (1, length), one sound, to ``record.x`` (1, *shape).

    Raises:
        ExportError: if the features have another shape than samples of ``data``.
    """
    reader = data.reader
    if not isinstance(reader, SoundReader) or not reader.mels:
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
    """Return all exchanges of a method, in the order in which they first come; the main one is the last."""
    names = exchange_names(len(method.opening), len(method.ahead))
    return tuple(
        Exchange(name, algorithm, state_read(algorithm, method.server_state))
        for name, algorithm in zip(names, method.exchanges, strict=True)
    )


def exchange_names(opening: int, ahead: int) -> tuple[str, ...]:
    """Return the names of a method's exchanges, for the numbers of exchanges before its main one."""
    return (*_numbered("opening", opening), *_numbered("ahead", ahead), "")


def _numbered(word: str, count: int) -> list[str]:
    return [word] if count == 1 else [f"{word}-{number}" for number in range(1, count + 1)]


def fetched(submodel: Submodel, tier: str, reads: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the names of the blobs that a device downloads to train.

    Args:
        submodel: the submodel. Its units are shared between tiers; one without units has a payload of the tier's own.
        tier: the tier's name, which that payload is called by.
        reads: names of the server's states.
    """
    if not submodel.units:
        own = f"{tier}/submodel"
        return (own, *(f"{own}/{name}" for name in reads))
    return (*submodel.units, *server_state.units_of(reads, submodel.units, trained_names(submodel.spec)))


def trained_names(spec: ModelSpec) -> tuple[str, ...]:
    """Return the names of the parameters that gradients move: each has a place in the server's state."""
    named = spec.module.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in named if parameter.requires_grad)

"""One exchange of a tier, compiled: what its devices download."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from edgefl.contract.algorithm import Algorithm
from edgefl.errors import ExportError
from edgefl.system.structs import digest_of
from edgefl.wire.bundle.archive import Bundle
from edgefl_export.bundle.build import Label, build_bundle
from edgefl_export.capture.fingerprint import Joints
from edgefl_export.front.cache import BundleCache, Found
from edgefl_export.front.order import Order

# What decides a bundle, as one digest: the same one means the same bundle, which then need not be compiled again.

_PACKAGES = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime")
"""They trace, write and check the graphs. What ExecuTorch is written by is its format's version."""


def bundle_digest(order: Order, joints: Joints | None = None) -> str:
    """Digest of all that decides the bundle that :func:`edgefl_export.front.compile.compiled` makes of ``order``.

    Models, submodels, algorithms and codecs count as what their functions compute, so another source with the same options
    is another bundle where it computes something else. ``joints`` keeps their graphs for the compiler. ExportError where
    one of them cannot be traced.
    """
    joints = joints or Joints()
    tier, exchange, form = order.tier, order.exchange, order.format
    return digest_of(
        {
            "source": source_digest(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "format": [form.name, form.version],
            "label": [order.model, tier.name, exchange.name],
            "data": order.data,
            "tokenizer": hashlib.sha256(order.tokenizer).hexdigest(),
            "chunk_bytes": order.chunk_bytes,
            "memory_budget": order.memory_budget,
            "prefix": [[chunk.units, joints.fingerprint(chunk.forward)] for chunk in tier.prefix],
            "fetched": tier.fetched(exchange),
            "algorithm": _plain(exchange.algorithm, joints),
        }
    )


def _plain(algorithm: Algorithm, joints: Joints) -> dict[str, object]:
    """What a manifest says of an algorithm, and the digests of its functions."""
    functions = {id(function): function for function in algorithm.functions}
    return {
        "name": algorithm.name,
        "functions": [joints.fingerprint(function) for function in functions.values()],
        "activations": [function.activations for function in functions.values()],
        "start": algorithm.start.name,
        "phases": [
            [each.name, each.function.name, each.steps, each.over_data, list(each.shorter)]
            for each in algorithm.phases
        ],
        "finish": algorithm.finish.name,
        "evaluate": algorithm.evaluate.name,
        "personalize": algorithm.personalize.name if algorithm.personalize else "",
        "hyper": dict(algorithm.hyper),
        "form": algorithm.form,
        "masks": dict(algorithm.masks),
        "draws": algorithm.draws,
        "carry": algorithm.carry_rule,
    }


PACKAGES = ("edgefl", "edgefl_export")
"""Whose source has a say in a bundle."""


@cache
def source_digest() -> str:
    """Of our own source: a tree that was edited compiles anew, whatever its version says."""
    total = hashlib.sha256()
    for package in PACKAGES:
        for name, source in _sources(package):
            total.update(f"{name}\n{hashlib.sha256(source).hexdigest()}\n".encode())
    return total.hexdigest()


def _sources(package: str) -> list[tuple[str, bytes]]:
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    return sorted(
        (f"{package}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        for path in folder.rglob("*.py")
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


Progress = Callable[[str], None]
"""Is told of each graph before it is made."""


def compiled(order: Order, progress: Progress = lambda _: None, joints: Joints | None = None) -> Bundle:
    """The bundle of ``order``. ``joints``: graphs of its functions that were traced before. ExportError if a graph cannot
    be made or disagrees with torch."""
    return build_bundle(
        order.exchange.algorithm,
        order.tier.prefix,
        order.tier.fetched(order.exchange),
        label=Label(order.model, order.tier.name, order.exchange.name),
        data=order.data,
        chunk_bytes=order.chunk_bytes,
        memory_budget=order.memory_budget,
        tokenizer=order.tokenizer,
        format=order.format,
        progress=progress,
        joints=joints,
    )


def cached(cache: BundleCache, order: Order, progress: Progress = lambda _: None) -> Found:
    """:func:`compiled`, or out of ``cache`` where it was made of the same things before; then ``progress`` is told
    nothing."""
    joints = Joints()
    try:
        digest = bundle_digest(order, joints)
    except ExportError:  # the compiler says where it fails and why
        return Found(compiled(order, progress), compiled=True)
    return cache.bundle(digest, lambda: compiled(order, progress, joints))

"""One exchange of a tier, compiled: what its devices download."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.limits import Limits
from exporters.bundle.build import Label, build_bundle
from exporters.bundle.formats import Format, Onnx
from exporters.front.cache import BundleCache, Found
from exporters.front.digest import bundle_digest
from exporters.front.tier import Exchange, Tier
from exporters.memory.recompute import Budget


def compiled(
    tier: Tier,
    exchange: Exchange,
    *,
    model: str,
    data: DataSpec,
    format: Format | None = None,
    chunk_bytes: int = Limits().chunk_bytes,
    memory_budget: Budget | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """The bundle of an exchange for samples like ``data``; ``model`` is what people read on it, ``format`` ONNX by default.

    ``progress`` is told of each graph before it is made. ExportError if a graph cannot be made or disagrees with torch.
    """
    return build_bundle(
        exchange.program,
        tier.prefix,
        tier.fetched(exchange),
        label=Label(model, tier.name, exchange.name),
        data=data,
        chunk_bytes=chunk_bytes,
        memory_budget=memory_budget,
        format=format,
        progress=progress,
    )


def cached(
    cache: BundleCache,
    tier: Tier,
    exchange: Exchange,
    *,
    model: str,
    data: DataSpec,
    format: Format | None = None,
    chunk_bytes: int = Limits().chunk_bytes,
    memory_budget: Budget | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """:func:`compiled`, or out of ``cache`` where it was made of the same things before; then ``progress`` is told
    nothing."""

    def make() -> Bundle:
        return compiled(
            tier,
            exchange,
            model=model,
            data=data,
            format=format,
            chunk_bytes=chunk_bytes,
            memory_budget=memory_budget,
            progress=progress,
        )

    try:
        digest = bundle_digest(
            tier,
            exchange,
            model=model,
            data=data,
            format=format or Onnx(),
            chunk_bytes=chunk_bytes,
            memory_budget=memory_budget,
        )
    except Exception:  # a function of a user's own that fails: the compiler says where and why
        return Found(make(), compiled=True)
    return cache.bundle(digest, make)

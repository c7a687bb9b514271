"""One exchange of a tier, compiled: what its devices download."""

from __future__ import annotations

from collections.abc import Callable

from edgefl.wire.bundle.archive import Bundle
from edgefl.wire.errors import ExportError
from exporters.bundle.build import Label, build_bundle
from exporters.capture.fingerprint import Joints
from exporters.front.cache import BundleCache, Found
from exporters.front.digest import bundle_digest
from exporters.front.order import Order

Progress = Callable[[str], None]
"""Is told of each graph before it is made."""


def compiled(order: Order, progress: Progress = lambda _: None, joints: Joints | None = None) -> Bundle:
    """The bundle of ``order``. ``joints``: graphs of its functions that were traced before. ExportError if a graph cannot
    be made or disagrees with torch."""
    return build_bundle(
        order.exchange.program,
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

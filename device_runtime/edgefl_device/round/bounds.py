"""What a round may ask of a device, checked before anything of it is fetched, unfolded or loaded.

A server that nobody vouches for says how large everything is. So what a blob unfolds to is held against the ports of the
graphs that read it, and these against the memory that the device offers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edgefl.errors import RoundDeclined
from edgefl.system.sizes import size
from edgefl.wire.blobs import BlobRef
from edgefl.wire.bundle.formats import is_older
from edgefl.wire.bundle.manifest import Graph, Manifest, Port
from edgefl.wire.limits import Limits
from edgefl.wire.mqtt.messages import NO_FORMAT, NO_MEMORY, TOO_MUCH
from edgefl_device.engine.base import Engine
from edgefl_device.round.job import Job

_LEAST_BYTES = 32 << 20
"""What any device is trusted to have: small offers are about a graph's own memory, and blobs have headers and constants."""
_SLACK = 2
"""A unit's blob may hold more than one graph reads: moving statistics, and what other tiers train."""


def check_manifest_ref(ref: BlobRef, limits: Limits) -> None:
    """RoundDeclined if the manifest itself is too large to be read."""
    _check([ref], limits.max_manifest_bytes, "its manifest", "raise limits.max_manifest_bytes")


def check_runtime(manifest: Manifest, engine: Engine) -> None:
    """Raise RoundDeclined if a graph of the bundle needs a newer release of the engine's runtime than this device has."""
    least = manifest.least_runtime
    if least and is_older(engine.version, least):
        raise RoundDeclined(
            NO_FORMAT,
            f"expected {engine.name} {least} or newer for tier {manifest.tier!r}, found {engine.version}; install it by "
            f'`pip install "{engine.name}>={least}"`',
            least=least,
            found=engine.version,
        )


def check_graphs(manifest: Manifest, graphs: Sequence[Graph], memory_bytes: int) -> None:
    """RoundDeclined if a bundle's blobs, or what one of its ``graphs`` reads at once, is more than the device offers."""
    most = max(memory_bytes, _LEAST_BYTES)
    remedy = "give it more (`edgefl device --memory`), or a tier that needs less"
    _check(manifest.blobs, most, "a blob of the bundle", remedy)
    for graph in graphs:
        for name, ports in (("reads", graph.inputs), ("gives", graph.outputs)):
            needed = sum(_nbytes(port) for port in ports)
            if needed > most:
                raise RoundDeclined(
                    NO_MEMORY,
                    f"graph {graph.name!r} {name} {size(needed)} at once, and this device offers {size(memory_bytes)}: "
                    f"{remedy}",
                    needs_bytes=needed,
                    offers_bytes=memory_bytes,
                )


def check_weights(job: Job, manifest: Manifest) -> None:
    """RoundDeclined if a blob of weights unfolds to more than the graphs of the round could read of it."""
    read = max(
        (sum(_nbytes(port) for port in graph.inputs_of("weights")) for graph in manifest.of_round), default=0
    )
    units = [*manifest.suffix, *(unit for chunk in manifest.prefix for unit in chunk.units)]
    refs = [ref for unit in units for ref in job.line(unit)]
    _check(
        refs, _SLACK * read + (1 << 20), "a blob of weights", "have the server publish what the bundle reads"
    )


def check_work(manifest: Manifest, rows: int, limits: Limits) -> None:
    """RoundDeclined if the round has more steps than the device makes."""
    steps = sum(manifest.steps_with(rows))
    if steps > limits.max_steps:
        raise RoundDeclined(
            TOO_MUCH,
            f"the round has {steps} local steps, and this device makes {limits.max_steps} at most: raise limits.max_steps, "
            "or have the server ask for fewer",
            steps=steps,
        )


def _check(refs: Iterable[BlobRef], most: int, what: str, remedy: str) -> None:
    for ref in refs:
        unfolded = max(ref.size, ref.raw)
        if unfolded > most:
            raise RoundDeclined(
                NO_MEMORY,
                f"{what} ({ref.sha256[:12]}) has {size(unfolded)} where at most {size(most)} are of use: {remedy}",
                needs_bytes=unfolded,
            )


def _nbytes(port: Port) -> int:
    """Exact, also of shapes that no array has."""
    return int(np.dtype(port.dtype).itemsize) * math.prod(port.shape)

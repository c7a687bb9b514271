"""Compiled tier as an object: the file that a device downloads, to be saved, measured and compared with torch.

Imports torch only for the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Self

from edgefl.api.progress import reporting
from edgefl.errors import BundleError
from edgefl.wire.bundle import archive
from edgefl.wire.bundle.manifest import Manifest
from edgefl.wire.limits import check_seed
from edgefl.wire.tensors import Array, Arrays
from edgefl.wire.text import notebook_table

if TYPE_CHECKING:
    from edgefl.config import Federation
    from edgefl.wire.bundle.profiles import BundleProfile
    from edgefl_export.compiler.request import Exchange, TierTraining
    from edgefl_export.compiler.verify import BundleCheck

_ANY = 1 << 30
"""Chunk size of a reference whose chunks nobody reads."""


@dataclass(frozen=True)
class Bundle:
    """The graphs of one tier, compiled with its training, and their manifest (table of contents).

    Attributes:
        contents: The manifest and blobs (graphs and weights as bytes, by digest), as they are sent to devices.
        made_of: The tier's training and the exchange (one round trip of an algorithm with several) that were compiled.
            None if the bundle was read from a file.
        compiled: True if it was compiled just now, not read from a file or the cache.
    """

    contents: archive.BundleArchive
    made_of: tuple[TierTraining, Exchange] | None = field(default=None, compare=False, repr=False)
    compiled: bool = field(default=False, compare=False)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the bundle in the file ``path``, with all digests verified.

        Raises:
            BundleError: the file is damaged or no bundle, or ``path`` is a folder.
        """
        return cls(archive.read_bundle(_file(Path(path))))

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle: names of model, tier and algorithm; graphs and their ports; phases; shape of the
        samples.
        """
        return self.contents.manifest

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest in hexadecimal digits, which identifies the bundle."""
        return self.contents.ref(_ANY).sha256

    @property
    def format(self) -> str:
        """``onnx`` or ``executorch``."""
        return self.manifest.format

    @property
    def nbytes(self) -> int:
        """Size of all blobs of the bundle in bytes, without the manifest."""
        return sum(map(len, self.contents.blobs.values()))

    def save(self, path: str | Path) -> Path:
        """Write the bundle to the file ``path`` atomically, and return the path. Missing folders are created."""
        archive.write_bundle(self.contents, Path(path))
        return Path(path)

    def verify(
        self,
        federation: Federation | None = None,
        *,
        model: str = "",
        seed: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> BundleCheck:
        """Compare every graph with torch on random inputs, each in the runtime of its format.

        A bundle from a file contains graphs and no code. Its functions are built again, from ``federation`` or from
        the model, algorithm and units (stages of the model) that the manifest names, with default options.

        Args:
            federation: the federation that the bundle was exported from.
            model: model that replaces the one that the manifest names.
            seed: seed of the inputs.
            progress: called with a text before each graph; by default a line in a terminal or a notebook shows
                it.

        Returns:
            The largest differences of each graph's outputs. ``ok`` is True if all are within the tolerance.

        Raises:
            ConfigError: the functions cannot be built again from these.
        """
        from edgefl.setup.bundles import request_of
        from edgefl_export.compiler.verify import verify_bundle

        manifest = self.manifest
        if self.made_of:
            tier, exchange = self.made_of
            request = tier.request(exchange, model=manifest.model, data=manifest.data)
        else:
            request = request_of(manifest, federation, model)
        number, total = count(1), len(manifest.graphs)
        with reporting(progress=progress, total=total) as report:
            return verify_bundle(
                self.contents,
                request,
                check_seed(seed),
                progress=lambda graph: report(f"comparing graph {next(number)} of {total}: {graph}"),
            )

    def profile(
        self,
        *,
        engine: str = "",
        threads: int = 1,
        repeat: int = 20,
        samples: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> BundleProfile:
        """Measure each graph on this machine, in a fresh process: milliseconds, bytes of memory and joules.

        Needs no torch.

        Args:
            engine: runtime; "" for the one of the bundle's format.
            threads: threads of the engine.
            repeat: number of timed calls of each graph.
            samples: rows of the round whose memory is measured; 0: two batches.
            progress: called with a text before each part; by default a line in a terminal or a notebook shows it.

        Raises:
            ConfigError: the engine is not installed.
        """
        from edgefl_device.profile.whole import ProfileSettings, profile_bundle

        settings = ProfileSettings(engine=engine, threads=threads, repeat=repeat, samples=samples)
        name = f"{self.manifest.model}, tier {self.manifest.tier}"
        with reporting(progress=progress) as report:
            return profile_bundle(self.contents, settings, lambda part: report(f"{name}: {part}"))

    def share(self, weights: Mapping[str, Array], number: int = 1) -> Arrays:
        """Return the part of a model's weights that a device of this tier downloads, float arrays by name in the bundle.

        Args:
            weights: float arrays by global name.
            number: number of the round, from 1; submodels may differ by round.

        Raises:
            BundleError: the bundle was read from a file, which does not describe how the submodel is cut.
        """
        if self.made_of is None:
            raise BundleError(
                f"the bundle of tier {self.manifest.tier!r} was read from a file, which does not say how the tier is cut: "
                "compile it here, or take weights from the broker",
                tier=self.manifest.tier,
            )
        submodel = self.made_of[0].submodel
        return dict(submodel.place(weights, number).payload) or dict(weights)

    def initial_weights(self) -> Arrays:
        """Return copies of the whole model's initial weights, float arrays by global name.

        Raises:
            BundleError: the bundle was read from a file, which contains none.
        """
        if self.made_of is None:
            raise BundleError(
                f"the bundle of tier {self.manifest.tier!r} was read from a file, which holds no weights: load those of a "
                "run, or compile it here",
                tier=self.manifest.tier,
            )
        weights = self.made_of[0].submodel.spec.weights
        return {name: tensor.cpu().numpy().copy() for name, tensor in weights.items()}

    def __repr__(self) -> str:
        manifest = self.manifest
        return (
            f"Bundle({manifest.model!r}, tier={manifest.tier!r}, algorithm={manifest.program!r}, "
            f"codec={manifest.codec!r}, format={self.format!r}, nbytes={self.nbytes})"
        )

    def _repr_html_(self) -> str:
        graphs = self.manifest.graphs
        return notebook_table(
            repr(self), [{"graph": each.name, "bytes": f"{each.blob.size:,}"} for each in graphs]
        )


def _file(path: Path) -> Path:
    """Return ``path`` if it is not a folder.

    Raises:
        BundleError: it is a folder. The text lists the bundles in it.
    """
    if not path.is_dir():
        return path
    bundles = sorted(str(file) for file in path.glob("*.efl"))
    advice = (
        f"name one of its bundles: {', '.join(bundles)}" if bundles else "there is no bundle (*.efl) in it"
    )
    raise BundleError(f"{path} is a folder; {advice}", path=str(path), found=tuple(bundles))

"""Names for keys of ``[data]`` and ``[tiers.*]``."""

from __future__ import annotations

from typing import Literal

DatasetName = Literal[
    "auto",
    "fashion_mnist",
    "mnist",
    "cifar10",
    "cifar10_jpeg",
    "digits",
    "random",
    "imdb",
    "ag_news",
    "wikitext2",
    "shakespeare",
    "file",
]
PartitionName = Literal[
    "auto",
    "dirichlet",
    "iid",
    "labels",
    "owners",
    "groups",
    "shards",
    "similarity",
    "dirichlet_equal",
    "dirichlet_clients",
    "paired",
]
Activations = Literal["float32", "float16"]
"""How what a forward pass makes waits for the backward pass."""

"""What the suite gives to plain code: its sizes and samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.suite import written
from edgefl.suite.architecture import CLASSES, IMAGE, VOCABULARY, WORDS, Architecture

SERIES = TensorSpec((32, 3))
PICTURE = TensorSpec((1, 16, 16))
SYMBOLS = 12
TABLE = {"dense": TensorSpec((6,)), "sparse": TensorSpec((3, 4), torch.int64, 50)}
PAIR = {"left": PICTURE, "right": PICTURE}
RATING = {"user": TensorSpec((), torch.int64, 40), "item": TensorSpec((), torch.int64, 60)}
GRAPH = {"nodes": TensorSpec((10, 5)), "adjacency": TensorSpec((10, 10), torch.int64, 2)}


def plain(
    name: str,
    kind: type[nn.Module],
    sample: TensorSpec | Mapping[str, TensorSpec],
    *arguments: Any,
    classes: int = CLASSES,
    loss: str = "",
) -> Architecture:
    return Architecture("plain", name, kind.__name__, partial(kind, *arguments), sample, classes, loss)


PLAIN = (
    plain("LSTM tagger", written.Tagger, WORDS, VOCABULARY, CLASSES, loss="sequence_cross_entropy"),
    plain("GRU over a sensor", written.GruClassifier, SERIES, 3, CLASSES),
    plain("TCN", written.TCN, SERIES, 3, CLASSES),
    plain("U-Net, pixels", written.UNet, IMAGE, CLASSES, loss="cross_entropy"),
    plain("VAE", written.VAE, IMAGE, classes=1, loss="squared_error"),
    plain("DLRM", written.DLRM, TABLE, 6, 50, 3, classes=2),
    plain("Siamese", written.Siamese, PAIR, classes=2),
    plain("Two towers", written.TwoTower, RATING, 40, 60, classes=1, loss="squared_error"),
    plain("DS-CNN", written.DSCNN, TensorSpec((1, 49, 10)), CLASSES),
    plain("nn.TransformerEncoder", written.TextTransformer, WORDS, VOCABULARY, CLASSES),
    plain("Text CNN", written.KimCNN, WORDS, VOCABULARY, CLASSES),
    plain("GCN", written.GCN, GRAPH, 5, CLASSES),
    plain(
        "CRNN with CTC", written.CRNN, TensorSpec((1, 8, 32)), SYMBOLS, classes=SYMBOLS, loss="ctc:length=4"
    ),
    plain("3D CNN", written.VideoCNN, TensorSpec((3, 4, 12, 12)), CLASSES),
)

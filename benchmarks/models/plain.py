"""Sizes and samples of plain code, torchvision and timm."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.models import written
from benchmarks.models.architecture import (
    CLASSES,
    IMAGE,
    LARGE_IMAGE,
    VOCABULARY,
    WORDS,
    Architecture,
    called,
)
from edgefl.contract.tensors import TensorSpec

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
VIDEO = TensorSpec((3, 4, 16, 16))


def torchvision(
    name: str, function: str, sample: TensorSpec = IMAGE, *, loss: str = "", **options: Any
) -> Architecture:
    make = called("torchvision", f"models.{function}", num_classes=CLASSES, **options)
    return Architecture("torchvision", name, function.rpartition(".")[2], make, sample, loss=loss)


def timm(name: str, model: str, sample: TensorSpec = IMAGE, **options: Any) -> Architecture:
    make = called("timm", "create_model", model, pretrained=False, num_classes=CLASSES, **options)
    return Architecture("timm", name, model, make, sample)


def timm_class(name: str, kind: str, sample: TensorSpec = IMAGE, **options: Any) -> Architecture:
    make = called("timm", f"models.{kind}", num_classes=CLASSES, **options)
    return Architecture("timm", name, kind.rpartition(".")[2], make, sample)


_SIZED: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 32,
    "mlp_dim": 64,
}
_WINDOWS: dict[str, Any] = {
    "patch_size": [2, 2],
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [1, 2],
    "window_size": [4, 4],
    "stochastic_depth_prob": 0.2,  # it has no default; that of swin_t
}
TORCHVISION = (
    torchvision("AlexNet", "alexnet", LARGE_IMAGE),
    torchvision("VGG-11", "vgg11"),
    torchvision("SqueezeNet 1.1", "squeezenet1_1"),
    torchvision("ShuffleNet v2", "shufflenet_v2_x0_5"),
    torchvision("MobileNet v2", "mobilenet_v2"),
    torchvision("MobileNet v3", "mobilenet_v3_small"),
    torchvision("MNASNet", "mnasnet0_5"),
    torchvision("ResNet-18", "resnet18"),
    torchvision("RegNet", "regnet_x_400mf"),
    torchvision("EfficientNet", "efficientnet_b0"),
    torchvision("DenseNet", "densenet.DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=16),
    torchvision("GoogLeNet", "googlenet", LARGE_IMAGE),
    torchvision("Vision Transformer", "vision_transformer.VisionTransformer", **_SIZED),
    torchvision("Swin", "swin_transformer.SwinTransformer", **_WINDOWS),
    torchvision(
        "LR-ASPP, pixels",
        "segmentation.lraspp_mobilenet_v3_large",
        loss="cross_entropy",
        weights_backbone=None,  # else it is fetched
    ),
    torchvision("ResNet 3D", "video.r3d_18", VIDEO),
)
TIMM = (
    timm_class("MLP-Mixer", "mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    timm("ResMLP", "resmlp_12_224", img_size=32),
    timm("GhostNet", "ghostnet_050"),
    timm("LCNet", "lcnet_050"),
    timm("EdgeNeXt", "edgenext_xx_small", LARGE_IMAGE, depths=(1, 1, 2, 1)),
    timm("MobileOne", "mobileone_s0", LARGE_IMAGE),
    timm("RepVGG", "repvgg_a0"),
    timm_class("ConvMixer", "convmixer.ConvMixer", dim=32, depth=2),
    timm("XCiT", "xcit_nano_12_p16_224", img_size=32, depth=2),
    timm("CaiT", "cait_xxs24_224", img_size=32, depth=2, embed_dim=32, num_heads=2),
    timm("ReXNet", "rexnet_100"),
    timm("CoaT", "coat_lite_tiny", img_size=64, sample=LARGE_IMAGE),
)

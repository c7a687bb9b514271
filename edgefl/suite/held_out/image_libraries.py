"""Models of torchvision and timm that the suite does not have: by their own functions, with fewer blocks where these take
long."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from edgefl.contract.tensors import TensorSpec
from edgefl.suite.architecture import CLASSES, IMAGE, LARGE_IMAGE, Architecture
from edgefl.suite.plain import VIDEO, timm, timm_class, torchvision

FILM = TensorSpec((3, 8, 32, 32))


def _convnext() -> nn.Module:
    room = importlib.import_module("torchvision.models.convnext")
    blocks = [room.CNBlockConfig(16, 32, 1), room.CNBlockConfig(32, None, 2)]
    return _module(room.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=CLASSES))


def _mvit() -> nn.Module:
    room = importlib.import_module("torchvision.models.video.mvit")
    blocks = [
        room.MSBlockConfig(1, 16, 32, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        room.MSBlockConfig(2, 32, 32, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 1, 1]),
    ]
    made = room.MViT(
        spatial_size=(32, 32),
        temporal_size=8,
        block_setting=blocks,
        residual_pool=False,
        residual_with_cls_embed=False,
        rel_pos_embed=False,
        proj_after_attn=False,
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
    )
    return _module(made)


def _bottlenecks(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        room = importlib.import_module("torchvision.models.resnet")
        return _module(room.ResNet(room.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, **options))

    return make


def _module(made: object) -> nn.Module:
    assert isinstance(made, nn.Module)
    return made


def _own(name: str, kind: str, make: Callable[[], nn.Module], sample: TensorSpec = IMAGE) -> Architecture:
    return Architecture("torchvision", name, kind, make, sample)


TORCHVISION = (
    _own("ConvNeXt", "ConvNeXt", _convnext),
    _own("ResNeXt", "ResNet", _bottlenecks(groups=32, width_per_group=4)),
    torchvision(
        "MaxViT",
        "maxvit.MaxVit",
        input_size=(32, 32),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=16,
        stochastic_depth_prob=0.2,
    ),
    torchvision(
        "DeepLab v3, pixels",
        "segmentation.deeplabv3_mobilenet_v3_large",
        LARGE_IMAGE,
        loss="cross_entropy",
        weights_backbone=None,
    ),
    _own("MViT", "MViT", _mvit, FILM),
    torchvision(
        "Video Swin",
        "video.swin_transformer.SwinTransformer3d",
        VIDEO,
        patch_size=[2, 4, 4],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=[2, 2, 2],
    ),
)

TIMM = (
    timm("ResNeSt", "resnest14d"),
    timm("NF-RegNet", "nf_regnet_b0"),
    timm("EfficientViT", "efficientvit_b0", LARGE_IMAGE),
    timm("FastViT", "fastvit_t8", LARGE_IMAGE, layers=(1, 1, 1, 1)),
    timm("TinyViT", "tiny_vit_5m_224", LARGE_IMAGE, depths=(1, 1, 2, 1), window_sizes=(4, 4, 4, 2)),
    timm_class(
        "VOLO",
        "volo.VOLO",
        LARGE_IMAGE,
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 32, 32, 32),
        num_heads=(2, 2, 2, 2),
    ),
    timm("ConViT", "convit_tiny", img_size=32, patch_size=8, depth=3, local_up_to_layer=2),
    timm("EVA-02", "eva02_tiny_patch14_224", TensorSpec((3, 28, 28)), img_size=28, depth=2),
    timm("Hiera", "hiera_tiny_224", LARGE_IMAGE, img_size=(64, 64), embed_dim=16, stages=(1, 1, 2, 1)),
    timm("DaViT", "davit_tiny", embed_dims=(16, 32, 32, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1)),
    timm(
        "Sequencer2D",
        "sequencer2d_s",
        embed_dims=(16, 32, 32, 32),
        hidden_sizes=(8, 8, 8, 8),
        layers=(1, 1, 1, 1),
        img_size=32,
        patch_sizes=(4, 2, 2, 1),
    ),
    timm("MobileNet v4", "mobilenetv4_conv_small"),
    timm("ConvNeXt", "convnext_atto", depths=(1, 1, 2, 1)),
    timm("EfficientNet, padded as TensorFlow", "tf_efficientnet_lite0"),
    timm("Res2Net", "res2net50_26w_4s", layers=[1, 1, 1, 1]),
    timm("GC-ResNeXt", "gcresnext26ts", LARGE_IMAGE),
    timm("PoolFormer v2", "poolformerv2_s12"),
    timm("MViT v2", "mvitv2_tiny", LARGE_IMAGE, img_size=64),
)

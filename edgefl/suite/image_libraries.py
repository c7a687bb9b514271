"""Models of torchvision and timm: their own functions where the result is small enough to train in seconds, else their
classes with fewer blocks."""

from __future__ import annotations

from typing import Any

from edgefl.contract.tensors import TensorSpec
from edgefl.suite.architecture import CLASSES, IMAGE, LARGE_IMAGE, Architecture, called

VIDEO = TensorSpec((3, 4, 16, 16))


def _torchvision(
    name: str, function: str, sample: TensorSpec = IMAGE, *, loss: str = "", **options: Any
) -> Architecture:
    make = called("torchvision", f"models.{function}", num_classes=CLASSES, **options)
    return Architecture("torchvision", name, function.rpartition(".")[2], make, sample, loss=loss)


def _timm(name: str, model: str, sample: TensorSpec = IMAGE, **options: Any) -> Architecture:
    make = called("timm", "create_model", model, pretrained=False, num_classes=CLASSES, **options)
    return Architecture("timm", name, model, make, sample)


def _timm_class(name: str, kind: str, **options: Any) -> Architecture:
    make = called("timm", f"models.{kind}", num_classes=CLASSES, **options)
    return Architecture("timm", name, kind.rpartition(".")[2], make, IMAGE)


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
    _torchvision("AlexNet", "alexnet", LARGE_IMAGE),
    _torchvision("VGG-11", "vgg11"),
    _torchvision("SqueezeNet 1.1", "squeezenet1_1"),
    _torchvision("ShuffleNet v2", "shufflenet_v2_x0_5"),
    _torchvision("MobileNet v2", "mobilenet_v2"),
    _torchvision("MobileNet v3", "mobilenet_v3_small"),
    _torchvision("MNASNet", "mnasnet0_5"),
    _torchvision("ResNet-18", "resnet18"),
    _torchvision("RegNet", "regnet_x_400mf"),
    _torchvision("EfficientNet", "efficientnet_b0"),
    _torchvision("DenseNet", "densenet.DenseNet", growth_rate=8, block_config=(2, 2), num_init_features=16),
    _torchvision("GoogLeNet", "googlenet", LARGE_IMAGE),
    _torchvision("Vision Transformer", "vision_transformer.VisionTransformer", **_SIZED),
    _torchvision("Swin", "swin_transformer.SwinTransformer", **_WINDOWS),
    _torchvision(
        "LR-ASPP, pixels",
        "segmentation.lraspp_mobilenet_v3_large",
        loss="cross_entropy",
        weights_backbone=None,  # else it is fetched
    ),
    _torchvision("ResNet 3D", "video.r3d_18", VIDEO),
)

TIMM = (
    _timm_class("MLP-Mixer", "mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2),
    _timm("ResMLP", "resmlp_12_224", img_size=32),
    _timm("GhostNet", "ghostnet_050"),
    _timm("LCNet", "lcnet_050"),
    _timm("EdgeNeXt", "edgenext_xx_small", LARGE_IMAGE, depths=(1, 1, 2, 1)),
    _timm("MobileOne", "mobileone_s0", LARGE_IMAGE),
    _timm("RepVGG", "repvgg_a0"),
    _timm_class("ConvMixer", "convmixer.ConvMixer", dim=32, depth=2),
    _timm("XCiT", "xcit_nano_12_p16_224", img_size=32, depth=2),
    _timm("CaiT", "cait_xxs24_224", img_size=32, depth=2, embed_dim=32, num_heads=2),
    _timm("ReXNet", "rexnet_100"),
    _timm("CoaT", "coat_lite_tiny", img_size=64, sample=LARGE_IMAGE),
)

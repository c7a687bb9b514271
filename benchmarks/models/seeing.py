"""Vision models of Hugging Face's transformers. Sizes only: stochastic depth and dropout have the library's rates."""

from __future__ import annotations

from typing import Any

from benchmarks.models.architecture import CLASSES, IMAGE, LARGE_IMAGE, Architecture, configured
from benchmarks.models.encoders import SMALL
from edgefl.contract.tensors import TensorSpec

TRANSFORMER: dict[str, Any] = {**SMALL, "image_size": 32, "patch_size": 8}
DINO: dict[str, Any] = {each: value for each, value in TRANSFORMER.items() if each != "intermediate_size"}
WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [1, 2],
    "num_heads": [1, 2],
    "window_size": 4,
}
STAGES: dict[str, Any] = {
    "hidden_sizes": [16, 32],
    "depths": [1, 2],
    "num_stages": 2,
    "patch_size": 2,
    "image_size": 32,
}
PYRAMID: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 2],
    "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "sr_ratios": [2, 1],
    "mlp_ratios": [2, 2],
}


def _vision(
    name: str,
    kind: str,
    sample: TensorSpec = IMAGE,
    *,
    tail: str = "ForImageClassification",
    loss: str = "",
    **sizes: Any,
) -> Architecture:
    kind += tail
    make = configured(kind, **sizes, num_labels=CLASSES)
    return Architecture("transformers", name, kind, make, sample, loss=loss)


SEEING = (
    _vision("ViT", "ViT", **TRANSFORMER),
    _vision("DeiT", "DeiT", **TRANSFORMER),
    _vision("BEiT", "Beit", **TRANSFORMER),
    _vision("Data2Vec, images", "Data2VecVision", **TRANSFORMER),
    _vision("DINOv2", "Dinov2", **DINO),
    _vision("DINOv2, registers", "Dinov2WithRegisters", **DINO),
    _vision("Swin", "Swin", **WINDOWS),
    _vision("Swin v2", "Swinv2", **WINDOWS),
    _vision("ConvNeXt", "ConvNext", **STAGES),
    _vision("ConvNeXt v2", "ConvNextV2", **STAGES),
    _vision("ResNet", "ResNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2]),
    _vision("BiT", "Bit", embedding_size=32, hidden_sizes=[128, 256], depths=[1, 2]),
    _vision("RegNet", "RegNet", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], groups_width=8),
    _vision("MobileNet v1", "MobileNetV1", LARGE_IMAGE, depth_multiplier=0.25, image_size=64),
    _vision("MobileNet v2", "MobileNetV2", LARGE_IMAGE, depth_multiplier=0.25, image_size=64),
    _vision(
        "MobileViT",
        "MobileViT",
        LARGE_IMAGE,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
    ),
    _vision(
        "EfficientNet",
        "EfficientNet",
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    _vision(
        "PoolFormer",
        "PoolFormer",
        num_encoder_blocks=2,
        depths=[1, 2],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
    ),
    _vision(
        "SegFormer, pixels",
        "Segformer",
        tail="ForSemanticSegmentation",
        loss="cross_entropy",
        decoder_hidden_size=16,
        **PYRAMID,
    ),
    _vision("PVT v2", "PvtV2", image_size=32, **PYRAMID),
    _vision(
        "PVT",
        "Pvt",
        image_size=32,
        num_encoder_blocks=2,
        depths=[1, 2],
        hidden_sizes=[16, 32],
        num_attention_heads=[1, 2],
        patch_sizes=[4, 2],
        strides=[4, 2],
        sequence_reduction_ratios=[2, 1],
        mlp_ratios=[2, 2],
    ),
    _vision("CvT", "Cvt", embed_dim=[16, 24, 32], num_heads=[1, 2, 2], depth=[1, 2, 3]),
    _vision(
        "LeViT",
        "Levit",
        LARGE_IMAGE,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[1, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
    ),
    _vision(
        "FocalNet",
        "FocalNet",
        image_size=32,
        patch_size=2,
        embed_dim=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
    ),
)

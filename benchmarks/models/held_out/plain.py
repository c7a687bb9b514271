"""Sizes and samples of the plain code."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.models.architecture import CLASSES, IMAGE, LARGE_IMAGE, MASK, VOCABULARY, WORDS, Architecture
from benchmarks.models.held_out import images, sequences, tables
from benchmarks.models.plain import GRAPH, PICTURE, SERIES, VIDEO, plain, timm, timm_class, torchvision
from edgefl.contract.tensors import TensorSpec

NUMBERS = TensorSpec((6,))
SIZES = (10, 20, 30)
CATEGORIES = TensorSpec((3,), WORDS.dtype, 10)
TAGS, PIXELS = "sequence_cross_entropy", "cross_entropy"

PLAIN = (
    plain("GRU over packed texts", sequences.PackedGRU, WORDS, VOCABULARY, CLASSES),
    plain(
        "LSTM over packed texts, tags",
        sequences.PackedLSTM,
        {"text": WORDS, "text_lengths": TensorSpec((), WORDS.dtype, 16)},
        VOCABULARY,
        CLASSES,
        loss=TAGS,
    ),
    plain("LSTM with attention", sequences.AttentionLSTM, WORDS, VOCABULARY, CLASSES),
    plain("LSTM forecaster", sequences.Forecaster, SERIES, 3, classes=1, loss="squared_error"),
    plain("nn.RNN", sequences.CharRNN, SERIES, 3, CLASSES),
    plain("LSTMCell decoder", sequences.CellSeq2Seq, SERIES, 3, classes=1, loss="squared_error"),
    plain("nanoGPT", sequences.NanoGPT, WORDS, VOCABULARY, classes=VOCABULARY, loss="causal_lm"),
    plain(
        "nn.Transformer",
        sequences.Translator,
        {"src": WORDS, "tgt": WORDS},
        VOCABULARY,
        classes=VOCABULARY,
        loss=TAGS,
    ),
    plain(
        "Masked mean",
        sequences.MaskedMean,
        {"input_ids": WORDS, "attention_mask": MASK},
        VOCABULARY,
        CLASSES,
    ),
    plain("WaveNet", sequences.WaveNet, SERIES, 3, CLASSES),
    plain("N-BEATS", sequences.NBeats, TensorSpec((24,)), 24, 6, classes=1, loss="squared_error"),
    plain("LeNet", images.LeNet, IMAGE, CLASSES),
    plain("SE and CBAM", images.AttentionNet, IMAGE, CLASSES),
    plain("Stochastic depth by random.random()", images.StochasticDepth, IMAGE, CLASSES),
    plain("FiLM", images.FiLM, {"image": IMAGE, "condition": NUMBERS}, 6, CLASSES),
    plain("Autoencoder", images.Autoencoder, IMAGE, classes=1, loss="squared_error"),
    plain("Cosine head", images.FaceNet, IMAGE, CLASSES),
    plain("ViT by einsum", images.EinsumViT, IMAGE, CLASSES),
    plain("Fourier filters", images.FourierNet, IMAGE, CLASSES),
    plain("Binary activations", images.BinaryNet, IMAGE, CLASSES),
    plain("Unfold and fold", images.FoldNet, IMAGE, CLASSES),
    plain("ESPCN", images.ESPCN, PICTURE, classes=1, loss="squared_error"),
    plain("Weight standardisation", images.WSNet, IMAGE, CLASSES),
    plain("U-Net of odd sizes", images.PixelUNet, TensorSpec((3, 31, 33)), CLASSES, loss=PIXELS),
    plain("VQ-VAE", images.VQVAE, IMAGE, classes=1, loss="squared_error"),
    plain("ConvLSTM", images.ConvLSTM, TensorSpec((3, 4, 12, 12)), CLASSES),
    plain(
        "Wide & Deep",
        tables.WideDeep,
        {"numbers": NUMBERS, "categories": CATEGORIES},
        list(SIZES),
        6,
        CLASSES,
    ),
    plain("DeepFM", tables.DeepFM, CATEGORIES, list(SIZES), classes=1, loss="squared_error"),
    plain("Mixture of experts", tables.MixtureOfExperts, NUMBERS, 6, CLASSES),
    plain("Neural ODE", tables.NeuralODE, NUMBERS, 6, CLASSES),
    plain("ParameterDict, nn.Bilinear", tables.Parameters, NUMBERS, 6, CLASSES),
    plain("DANN", tables.DANN, NUMBERS, 6, CLASSES),
    plain("PointNet", tables.PointNet, TensorSpec((3, 20)), CLASSES),
    plain("GAT", tables.GAT, GRAPH, 5, CLASSES),
    plain(
        "TabTransformer",
        tables.TabTransformer,
        {"categories": CATEGORIES, "numbers": NUMBERS},
        SIZES,
        6,
        CLASSES,
    ),
    plain("Gumbel softmax", tables.GumbelNet, NUMBERS, 6, CLASSES),
    plain("SIREN", tables.Siren, NUMBERS, 6, 2, classes=1, loss="squared_error"),
    plain("TabNet", tables.TabNet, NUMBERS, 6, CLASSES),
)


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

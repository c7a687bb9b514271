"""Sizes and samples of the plain code."""

from __future__ import annotations

from edgefl.contract.tensors import TensorSpec
from edgefl.suite.architecture import CLASSES, IMAGE, MASK, VOCABULARY, WORDS
from edgefl.suite.held_out import images, sequences, tables
from edgefl.suite.plain import GRAPH, PICTURE, SERIES, plain

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

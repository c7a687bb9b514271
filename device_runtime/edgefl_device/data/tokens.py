"""Texts as token numbers: by the tokenizer in the bundle (extra ``text``), or the bytes of UTF-8, which need nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgefl.errors import BundleError, ConfigError
from edgefl.wire.bundle.manifest import DataSpec
from edgefl.wire.bundle.readers import TextReader
from edgefl.wire.records import BadRow
from edgefl.wire.tensors import Array
from edgefl_device.data.reading import Reading

Encode = Callable[[Sequence[str]], Sequence[Array]]
"""Texts as the token numbers of each, (tokens,)."""


def encoder(reading: Reading, reader: TextReader) -> Encode:
    """ConfigError without the tokenizer's library, BundleError if the bundle's tokenizer is damaged."""
    if reader.tokenizer is None:
        return lambda texts: [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "texts become tokens by the library tokenizers, which is not installed: pip install 'edgefl-tiers[text]'"
        ) from error
    content = reading.parts.blob(reader.tokenizer)
    try:
        made = Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises its own bare exceptions
        raise BundleError(
            f"the bundle's tokenizer cannot be read: {error}; export the bundle again"
        ) from error

    def encode(texts: Sequence[str]) -> list[Array]:
        found = made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int64) for each in found]

    return encode


def check_vocabulary(spec: DataSpec, tokens: Array) -> None:
    """BadRow for a token that the model does not know."""
    if spec.below and tokens.size and tokens.max() >= spec.below:
        raise BadRow(f"token {tokens.max()} is beyond the vocabulary, whose tokens are 0 to {spec.below - 1}")


def kept_as(spec: DataSpec) -> np.dtype:
    """The smallest type that holds the tokens of ``spec``, which become its own when a batch is drawn."""
    own = np.dtype(spec.dtype)
    return np.min_scalar_type(spec.below - 1) if spec.below and own.kind in "iu" else own

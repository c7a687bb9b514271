"""Conversion of texts to token numbers: by a trained tokenizer (extra ``text``), or as bytes of UTF-8, without a library.

A tokenizer is stored as JSON of the ``tokenizers`` library. Token 0 is padding, token 1 an unknown word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgefl.errors import ConfigError, DataError
from edgefl.system.files import write_whole
from edgefl.wire import folders

PAD, UNKNOWN = "<pad>", "<unk>"
BYTES = 256
"""Number of tokens of the vocabulary of bytes. Texts contain no byte 0, which is padding."""


@dataclass(frozen=True)
class Vocabulary:
    """Conversion of texts to token numbers 0 .. size-1.

    Attributes:
        size: Number of tokens.
        tokenizer: JSON of the tokenizer. Empty: tokens are the bytes of UTF-8.
    """

    size: int = BYTES
    tokenizer: bytes = b""

    def encoder(self) -> Callable[[Sequence[str]], list[list[int]]]:
        """Return a function that takes texts and returns the list of token numbers of each.

        Raises:
            ConfigError: The library ``tokenizers`` is not installed.
            DataError: The tokenizer is damaged.
        """
        if not self.tokenizer:
            return lambda texts: [list(text.encode("utf-8")) for text in texts]
        try:
            made = _library().Tokenizer.from_str(self.tokenizer.decode("utf-8"))
        except ConfigError:
            raise
        except Exception as error:  # the library raises its own bare exceptions
            raise DataError(f"the tokenizer cannot be read: {error}; make it again") from error
        return lambda texts: [
            each.ids for each in made.encode_batch_fast(list(texts), add_special_tokens=False)
        ]


def words(texts: Iterable[str], size: int) -> Vocabulary:
    """Return a vocabulary of the most frequent words of ``texts``, lower case and without punctuation.

    Words with equal frequency are ordered alphabetically, so that equal texts give equal numbers.

    Args:
        texts: Texts to count words in.
        size: Number of tokens, padding and unknown word included.

    Raises:
        ConfigError: The library ``tokenizers`` is not installed.
    """
    library = _library()
    plain = library.normalizers.Sequence([library.normalizers.NFKC(), library.normalizers.Lowercase()])
    return _train_vocabulary(texts, size, plain, library.pre_tokenizers.BertPreTokenizer())


def separated(texts: Sequence[str], size: int) -> Vocabulary:
    """Return a vocabulary like :func:`words` for texts whose tokens are separated by spaces (WikiText). Case is kept."""
    return _train_vocabulary(texts, size, None, _library().pre_tokenizers.WhitespaceSplit())


def cached_vocabulary(
    made: Callable[[Sequence[str], int], Vocabulary], texts: Sequence[str], size: int
) -> Vocabulary:
    """Return the vocabulary of ``texts`` from the user's cache folder. If it is missing, make it and write it there.

    Without the cache, counting the words of tens of thousands of texts takes seconds in every run and every worker.

    Args:
        made: :func:`words` or :func:`separated`, which makes the vocabulary.
        texts: Texts to count words in.
        size: Number of tokens.

    Raises:
        ConfigError: The library ``tokenizers`` is not installed.
    """
    try:
        place = _cache_path(made, texts, size)
    except ConfigError:  # nowhere to keep anything
        return made(texts, size)
    with suppress(OSError, DataError):
        before = Vocabulary(size, place.read_bytes())
        before.encoder()
        return before
    vocabulary = made(texts, size)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, vocabulary.tokenizer)
    return vocabulary


def _cache_path(made: Callable[[Sequence[str], int], Vocabulary], texts: Sequence[str], size: int) -> Path:
    """Return the path of a cached vocabulary. Its name is a digest of the arguments and of the library's version.

    Raises:
        ConfigError: There is no cache folder, or the library ``tokenizers`` is not installed.
    """
    digest = hashlib.sha256(f"{made.__name__} {size} {_library().__version__}".encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return folders.cache("vocabularies") / "vocabularies" / f"{digest.hexdigest()}.json"


def _train_vocabulary(texts: Iterable[str], size: int, normalizer: Any, split: Any) -> Vocabulary:
    """Return a vocabulary of whole words, trained on ``texts``.

    Args:
        texts: Texts to count words in.
        size: Number of tokens, padding and unknown word included.
        normalizer: Normalizer of the library ``tokenizers``; None: texts stay as they are.
        split: Pre-tokenizer of the library, which splits a text into words.
    """
    library = _library()
    made = library.Tokenizer(library.models.WordLevel(vocab={}, unk_token=UNKNOWN))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = split
    trainer = library.trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=[PAD, UNKNOWN], show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return Vocabulary(size, made.to_str().encode())


def _library() -> Any:
    """Import and return the package ``tokenizers``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "texts become words by the library tokenizers, which is not installed: pip install 'edgefl-tiers[text]', or "
            'take their bytes (tokens = "bytes")'
        ) from error
    return tokenizers

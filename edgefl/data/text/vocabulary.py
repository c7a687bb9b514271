"""Texts as token numbers: a trained tokenizer (extra ``text``), or the bytes of UTF-8, which need nothing.

A tokenizer is the JSON of the ``tokenizers`` library. Number 0 is padding and 1 an unknown word.
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
"""Size of the vocabulary of bytes; a text has no byte 0, which is padding."""


@dataclass(frozen=True)
class Vocabulary:
    """Conversion of texts to numbers 0 .. size-1; ``tokenizer`` is its JSON, empty for bytes."""

    size: int = BYTES
    tokenizer: bytes = b""

    def encoder(self) -> Callable[[Sequence[str]], list[list[int]]]:
        """Return ``texts -> token numbers``; raise ConfigError without the library, DataError for a damaged tokenizer."""
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
    """Return a vocabulary of the ``size`` most frequent lower-case words of ``texts``, without punctuation; others are
    unknown.

    Words of equal frequency are in alphabetical order, so that equal texts give equal numbers.
    """
    library = _library()
    plain = library.normalizers.Sequence([library.normalizers.NFKC(), library.normalizers.Lowercase()])
    return _trained(texts, size, plain, library.pre_tokenizers.BertPreTokenizer())


def separated(texts: Sequence[str], size: int) -> Vocabulary:
    """Return the same for texts with tokens between spaces already, taken as they are (WikiText)."""
    return _trained(texts, size, None, _library().pre_tokenizers.WhitespaceSplit())


def cached_vocabulary(
    made: Callable[[Sequence[str], int], Vocabulary], texts: Sequence[str], size: int
) -> Vocabulary:
    """Return ``made(texts, size)``, one of the functions above, from the cache folder if possible.

    To count the words of tens of thousands of texts takes seconds, in every run and worker of a simulation.
    """
    try:
        place = _place(made, texts, size)
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


def _place(made: Callable[[Sequence[str], int], Vocabulary], texts: Sequence[str], size: int) -> Path:
    """Return the path of a cached vocabulary, named by all that decides it."""
    digest = hashlib.sha256(f"{made.__name__} {size} {_library().__version__}".encode())
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text.encode())
    return folders.cache("vocabularies") / "vocabularies" / f"{digest.hexdigest()}.json"


def _trained(texts: Iterable[str], size: int, normalizer: Any, split: Any) -> Vocabulary:
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
    try:
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers, trainers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "texts become words by the library tokenizers, which is not installed: pip install 'edgefl-tiers[text]', or "
            'take their bytes (tokens = "bytes")'
        ) from error
    return tokenizers

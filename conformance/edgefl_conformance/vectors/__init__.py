"""The vectors: bytes, and what they stand for, in files that any language reads."""

"""Codecs: the bytes of an update and what they mean."""

"""Test vectors of the protocol: bytes and their meaning, in files for any language."""

"""Texts: the search for corpora, their conversion to token numbers, and samples made of tokens."""

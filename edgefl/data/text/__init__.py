"""Texts: where corpora are found, how they become token numbers, and the samples that are made of them."""

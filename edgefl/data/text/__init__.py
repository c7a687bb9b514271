"""Texts: the search for corpora, their token numbers, and samples made of them."""

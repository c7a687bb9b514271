"""Profiles for people: rows of tables, a page of pictures, and the accuracy that a run reached beside its memory."""

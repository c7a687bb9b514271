"""Deliberately wrong agents: each is `edgefl device` with one thing done wrong.

``python -m tests.conformance.wrong training.batch_order device --id ...``
"""

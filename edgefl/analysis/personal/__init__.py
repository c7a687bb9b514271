"""Evaluation of personalization: the metrics of each user before and after a few steps on its own data.

``evaluate`` measures users in torch, ``report`` sums them up, and ``finished`` reads a run's folder.
"""

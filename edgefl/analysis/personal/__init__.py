"""Personalization, evaluated: what a model is worth to each user after a few steps on the user's own data.

``evaluate`` measures users in torch, ``report`` sums them up, ``finished`` takes a run's folder, ``picture`` draws.
"""

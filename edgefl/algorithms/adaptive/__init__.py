"""FAFED and its baselines: recursive momentum, adaptive steps, their schedules."""

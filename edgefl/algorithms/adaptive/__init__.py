"""FAFED and what it is compared with: recursive momentum, adaptive steps, their schedules."""

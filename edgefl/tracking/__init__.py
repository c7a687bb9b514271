"""Trackers of a run or simulation: TensorBoard and MLflow get its rounds and files during the training."""

"""Objectives: the loss of a submodel as pure functions of named tensors, with its carrier, derivatives and step parts."""

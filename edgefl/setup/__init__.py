"""Conversion of a federation file to objects: data, model, submodels, algorithms. Starts no process."""

"""From a federation file to objects: data, model, submodels, algorithms. Knows no process."""

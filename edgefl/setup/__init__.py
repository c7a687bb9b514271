"""From a federation file to objects: data, model, submodels, programs. Knows no process."""

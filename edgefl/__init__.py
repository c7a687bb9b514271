"""The method: wire formats, models, submodels, programs, data and the command line."""

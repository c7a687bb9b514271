"""The models by name, one file for each family."""

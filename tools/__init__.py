"""Scripts that make files of the repository: facts, pictures, environments."""

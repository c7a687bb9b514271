"""The facts that are shipped about the catalogs."""

"""Small bundles of the package, and the expected results of their rounds."""

"""Small bundles that lie in the package, and what a round of each has to give."""

"""``edgefl ls``, ``edgefl inspect``, ``edgefl validate``: show catalogs, bundles and federation files."""

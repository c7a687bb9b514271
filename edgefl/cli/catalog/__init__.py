"""``edgefl ls``, ``edgefl inspect``, ``edgefl validate``: look at what there is."""

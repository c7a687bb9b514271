"""Every covered op on its own: one file per family, each a dictionary of cases; ``docs/models/ops.md`` is made from them."""

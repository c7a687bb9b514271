"""A function becomes a graph of core ops; what cannot is refused with its module and line."""

"""Access lists and what hosted brokers take."""

"""From chunks on a topic to a checked, journalled update."""

"""Real connections of many devices to a real server, and what a round of them costs."""

"""``edgefl device``: the agent and what else runs on a device. Never imports torch."""

"""Parts of a played case: broker, agent, the relay between them, and the scripted server."""

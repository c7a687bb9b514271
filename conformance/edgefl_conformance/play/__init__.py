"""What a case is played with: a broker, the agent's process, what is between them, and a server that does as it is told."""

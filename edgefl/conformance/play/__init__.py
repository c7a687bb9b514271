"""What a case is played with: a broker, the agent's process, what is between the two, and a server that does as it is told."""

"""Messages, topics and the broker session."""

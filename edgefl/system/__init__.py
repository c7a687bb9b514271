"""What both sides need of the operating system, without torch."""

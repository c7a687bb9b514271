"""What a federation makes of faults and of messages that nobody should send, on real processes and a real broker."""

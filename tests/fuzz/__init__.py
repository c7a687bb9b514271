"""What anybody may send, against everything that reads it: errors of our own, and bounded memory."""

"""What the documentation shows, checked."""

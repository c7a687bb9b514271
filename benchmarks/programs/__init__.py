"""What a round of each program costs."""

"""What a round of each algorithm costs."""

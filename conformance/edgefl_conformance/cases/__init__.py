"""What is asked of an agent, case by case."""

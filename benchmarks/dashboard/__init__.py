"""What the fleet's page costs, in a real browser."""

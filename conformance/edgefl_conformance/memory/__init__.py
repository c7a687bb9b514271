"""Memory of an agent in a round, compared with the plan of its bundle."""

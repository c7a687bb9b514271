"""Three training steps of a user's module by plain torch, beside three of the graph that devices will run."""

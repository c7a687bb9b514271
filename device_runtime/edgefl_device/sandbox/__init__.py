"""Engine in a separate process with few rights, so that its crash costs only one attempt at a round."""

"""What training minimises, as pure functions of named tensors: objective, carrier, derivatives, and the parts of a step."""

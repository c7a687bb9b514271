"""How different users are, from their labels, inputs, gradients and curvature, and what the theory makes of it."""

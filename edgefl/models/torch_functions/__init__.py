"""Functions of torch as a training graph needs them: replaced, refused, or fed with given random numbers."""

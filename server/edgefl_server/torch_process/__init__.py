"""Child process of a server that has torch: it composes the run and calls the run's functions."""

"""Child process with torch: composes the run and calls its functions, so that the server itself does not load torch."""

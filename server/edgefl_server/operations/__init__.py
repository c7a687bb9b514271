"""Orders of operators to a running server, and its vitals."""

"""What operators do to a running server, and how it fares: orders that are left in its folder, and its vitals."""

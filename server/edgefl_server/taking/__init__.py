"""What takes the updates of a round, in the server itself or in a worker: it imports no torch."""

"""A whole federation in one process: the server's own rounds, and clients that train the programs' functions in torch."""

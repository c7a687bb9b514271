"""A whole federation without a broker: the server's own rounds, and clients that train the algorithms' functions in
torch."""

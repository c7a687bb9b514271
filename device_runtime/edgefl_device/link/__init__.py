"""What goes over the link: blobs fetched, updates sent until the server has spoken."""

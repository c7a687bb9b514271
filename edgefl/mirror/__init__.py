"""A mirror: a folder of blobs over HTTP, or a gateway's cache of another mirror."""

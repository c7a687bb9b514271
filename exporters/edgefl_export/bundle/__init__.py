"""A tier's bundle: graphs in their formats, wired together, listed in a manifest, verified."""

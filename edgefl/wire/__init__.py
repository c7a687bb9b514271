"""Definitions that server and devices share, without torch: messages, topics, manifest, blobs, tensors, broker session."""

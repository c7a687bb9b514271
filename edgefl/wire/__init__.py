"""Everything both sides agree on, without torch: messages, topics, manifest, chunks, tensors, the broker session."""

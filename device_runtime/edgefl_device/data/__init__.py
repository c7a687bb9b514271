"""Local data: samples, batches, and which of them judge a personal model."""

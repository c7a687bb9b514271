"""Local data: readers, samples, batches, and the selection of samples that evaluate a personal model."""

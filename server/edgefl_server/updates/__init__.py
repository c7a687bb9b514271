"""Reception of model updates: rate limit, reassembly, validation, journal, sums and acknowledgement."""

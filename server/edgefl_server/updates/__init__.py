"""Reception of updates: rate limits, reassembly, validation, journal, sums and acknowledgement."""

"""The rounds of a run as a pure state machine, and who takes part. No I/O."""

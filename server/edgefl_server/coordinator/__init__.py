"""Pure state machine of a run's rounds, and the selection of devices. No I/O."""

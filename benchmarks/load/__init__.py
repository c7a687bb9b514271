"""Load generator: thousands of devices in one process that speak the protocol and train nothing."""

"""Which key a device has: the list of devices, and the door that every message of one comes through."""

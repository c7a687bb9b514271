"""What it costs a device to make the bytes of an update."""

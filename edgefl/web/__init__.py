"""Web page through which browsers join a federation, with its QR code and its relay to the broker."""

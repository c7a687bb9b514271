"""The page on which browsers join a federation: what it serves, its QR code, and its way to the broker."""

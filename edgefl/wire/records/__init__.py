"""Records of CSV and JSON lines: how a device and the server's data read them."""

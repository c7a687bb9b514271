"""Identity of devices: the registry of their keys, and the authentication of their messages."""

"""Commands that run a federation: everything on one machine, a server, a broker."""

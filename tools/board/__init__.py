"""`make board`: the agents in a Debian root for arm64, run under emulation against a server on this machine."""

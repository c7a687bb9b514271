"""Workers of a server and of a simulation: processes of this machine, or actors on a Ray cluster."""

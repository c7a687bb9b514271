"""Workers of a server or a simulation: processes of this machine, or actors on a Ray cluster."""

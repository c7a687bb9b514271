"""The same algorithms, many clients, one process; here, one client's round in torch, the oracle for the device."""

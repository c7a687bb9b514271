"""Devices in other languages than Python, against the same brokers, servers and vectors."""

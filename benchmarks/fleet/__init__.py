"""Rounds of many generated devices against a real broker and a real server."""

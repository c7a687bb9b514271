"""The form of an update on the wire, its plain reader, and its size before it is there."""

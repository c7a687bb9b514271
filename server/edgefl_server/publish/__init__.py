"""Data for devices: retained blobs, announcements, the encoded downlink."""

"""What devices may fetch: retained blobs, announcements, the encoded downlink."""

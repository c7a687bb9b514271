"""Publication of data for devices: blobs, announcements, tasks and the encoded model."""

"""Connection to the federation: download of blobs, upload of updates, identity and status."""

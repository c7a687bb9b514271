"""One training step beside torch eager and other trainers."""

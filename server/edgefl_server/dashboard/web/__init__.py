"""The page as a web server: what it answers, whom it tells of what is new, and where orders come in."""

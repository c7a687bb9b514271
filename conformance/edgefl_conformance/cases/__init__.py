"""Cases by group."""

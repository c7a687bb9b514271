"""Web server of the dashboard: pages, streams of changes, and orders."""

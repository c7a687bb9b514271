"""The browser agent, and the page on which browsers join."""

"""Source modules and lines of the nodes of a bundle's graphs."""

"""Federation files."""

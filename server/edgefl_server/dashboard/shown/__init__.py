"""What is known as rows, tables, charts, pages and metrics."""

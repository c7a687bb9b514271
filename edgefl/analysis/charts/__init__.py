"""What people look at: charts as self-contained SVG text, without a plotting library."""

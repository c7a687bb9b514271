"""Updates on the wire: their form, their size, and a plain reader."""

"""What commands print and which input they refuse, without starting devices."""

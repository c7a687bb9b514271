"""Access rules of a federation's topics for several brokers, their limits, and certificates for a lab broker."""

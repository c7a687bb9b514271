"""The server's aggregator beside Flower's and a plain copy."""

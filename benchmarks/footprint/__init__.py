"""What a device's process costs before it trains."""

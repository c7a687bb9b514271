"""The current model adapted to this device's data, from a broker or from files."""

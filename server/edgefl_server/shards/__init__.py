"""Aggregation workers: processes or Ray actors that receive the updates of their shards of devices."""

"""The front of the compiler: tiers, digests and the cache of bundles."""

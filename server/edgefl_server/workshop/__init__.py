"""The process beside a server that has torch: it composes the run, and then computes what needs models."""

"""Headrace beside its peers, measured in turn: `python -m benchmarks WORKLOAD`."""

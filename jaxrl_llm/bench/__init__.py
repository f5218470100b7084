"""Benchmarks: measured figures beside the floors of the machine."""

"""Starts runs: on this machine, or on TPU slices through the tools that people already use."""

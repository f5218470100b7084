"""Decoders as pure functions over a parameter tree; see `decoder.py` first."""

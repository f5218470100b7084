"""Weights on disk: safetensors folders, GGUF files, wheels and the hub, in; safetensors folders, out."""

__all__: list[str] = []

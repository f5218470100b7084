"""Text to token ids and back: tokenizer, chat templates, streams of text, token-in/token-out conversations."""

__all__: list[str] = []

"""Sources of prompts."""

"""Tokenizers, and the prompts of zero-shot classification."""

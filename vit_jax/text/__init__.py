"""Tokenizers, and prompts for zero-shot classification."""

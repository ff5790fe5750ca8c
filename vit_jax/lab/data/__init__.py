"""Data sets of experiments."""

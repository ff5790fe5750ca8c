"""Experiments on top of the library."""

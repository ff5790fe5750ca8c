"""Metrics of boxes and segments."""

"""Detectors and feature pyramids."""

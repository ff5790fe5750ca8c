"""Layers that two or more models share; no model is known here."""

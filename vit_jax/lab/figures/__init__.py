"""Figures of runs beside published results."""

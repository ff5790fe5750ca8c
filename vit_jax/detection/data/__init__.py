"""Data sets with boxes, and their ops."""

"""Checkpoints of train states, verified bit for bit when they are read."""

"""Writes a page about a run, one HTML file that contains everything: see `__main__`."""

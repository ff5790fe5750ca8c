"""Rename tables of each family of models, in the formats that hold it.

Every module has `FORMATS`, a tuple of `formats.Format`; `formats.FAMILIES` lists them.
"""

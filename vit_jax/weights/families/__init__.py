"""Rename tables of each family of models: modules with FORMATS, of `formats.Format`."""

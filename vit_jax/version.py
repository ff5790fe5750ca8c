"""The version. setup.py reads it with a regular expression, without an import."""

__version__ = '0.1.0'

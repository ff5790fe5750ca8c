"""Preprocessing ops. Modules of this folder register them, see `registry`."""

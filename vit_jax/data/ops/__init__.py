"""Preprocessing ops: every module of this folder may register some (see `registry`)."""

"""A run: `run` is its table of contents, `step` its mathematics, `loop` what happens around a step."""

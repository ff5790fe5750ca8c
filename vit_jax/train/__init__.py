"""Trains models. `run` is the place to begin. There are three kinds of modules:

Training itself: `run`, `trainer`, `step`, `loop`, `evaluations`.
The record of a run: `metrics`, `loggers`, `progress`, `status`.
The process: `program`, `process`, `workdir`, `runtime`, `schema`, `resume`.
"""

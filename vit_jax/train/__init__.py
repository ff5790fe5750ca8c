"""Training. There are three kinds of modules:

Training itself: `trainer`, `step`, `state`, `loop`, `evaluations`, `run` (begin there).
The record of a run: `metrics`, `loggers`, `progress`, `status`.
The process: `program`, `process`, `workdir`, `runtime`, `schema`, `resume`.
"""

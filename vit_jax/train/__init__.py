"""Training. Three kinds of files:

training: `trainer`, `step`, `state`, `loop`, `evaluations`, `run` (the table of contents);
the record: `metrics`, `loggers`, `progress`, `status`;
the process: `program`, `process`, `workdir`, `runtime`, `schema`, `resume`.
"""

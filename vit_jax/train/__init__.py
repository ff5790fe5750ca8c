"""Training. Three kinds of files:

training: `trainer`, `step`, `state`, `loop`, `evaluations`, `run` (the table of contents);
the record: `metrics`, `events`, `loggers`, `progress`, `status`, `environment`;
the process: `arguments`, `program`, `process`, `workdir`, `runtime`, `schema`, `resume`.
"""

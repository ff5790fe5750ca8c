"""Where examples come from: one module per kind of source, named in `registry`."""

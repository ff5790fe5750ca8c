"""A page per run, one HTML file with everything in it: see __main__."""

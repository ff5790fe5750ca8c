"""Several runs as one experiment: cells -> the runs of all seeds -> rows of numbers."""

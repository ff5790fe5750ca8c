"""Weight files of detectors."""

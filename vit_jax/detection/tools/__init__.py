"""The parts of the command-line tools that are for detectors and segmenters."""

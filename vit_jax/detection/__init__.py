"""Boxes and masks: models, tasks, data, evaluators and weights of detectors."""

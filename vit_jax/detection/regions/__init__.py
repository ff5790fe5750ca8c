"""Boxes as regions of a map: anchors, box codes, assignment, suppression and RoIAlign."""

"""Colours that tell kinds apart."""

# Okabe and Ito's, safe for colour-blind readers; without yellow, faint on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#444444')

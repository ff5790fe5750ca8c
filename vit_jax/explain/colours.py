"""Colours for classes and curves that readers can tell apart."""

# The colours of Okabe and Ito, which colour-blind readers can tell apart. Yellow is left out,
# because it is faint on white.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#444444')

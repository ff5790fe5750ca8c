"""The COCO format of objects in images, and its metric, in NumPy.

`objects`: annotated or detected, as columns; `files` reads them; `rle` and `polygon`: the forms
of masks; `average_precision`: the twelve numbers.
"""

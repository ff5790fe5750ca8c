"""The COCO format of objects in images, and its metric, in NumPy.

`files` reads ground truth and detections, `rle` and `polygon` are the forms of masks,
`average_precision` computes the twelve numbers.
"""

"""Data: from bytes on disk to batches for the device.

    source (random access) -> order (arithmetic) -> ops (a string) -> pipeline (batches)

The only package that imports TensorFlow, and only when the first batch is made: a
wrong source, split or op is reported before that.
"""

"""Writes prepared data sets, which `tfds:NAME` and TFDS itself then read.

    folders, tars, manifest -> plan (key, split, labels) -> checks -> local | builder

`imagenet21k` and `images` make the plan. `local` carries it out in one process and can
be interrupted at any time; `builder` on a cluster, as a TFDS builder with an Apache Beam
pipeline. Both write the same examples in the same order, and a `report` beside them.
"""

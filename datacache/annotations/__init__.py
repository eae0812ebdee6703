"""Annotations: what is on the images of a snapshot, in one model whatever the format it was written in.

`model` has the values; `voc`, `yolo`, `coco` and `keras_yolo` read and write the formats; `image_header` knows an
image's size without decoding it; `check` turns what a file says into what can be meant, and reports the difference;
`table` is all of a snapshot's annotations as columns, kept in the catalog, which queries, statistics and conversions
read.
"""

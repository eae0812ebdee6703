"""Predict on a snapshot: decoders, processes with a model, and what becomes of their results.

`predict` runs in the process that asks: it hands out batches, filters what comes back, keeps it in a log and makes the
snapshot. `stages` is what happens in a model's process and in its decoders, `processes` starts such processes and
speaks with them, `elsewhere` is the same on an engine, `checksums` tells models apart, `results` is what is kept of an
image, `snapshots` makes labels of predictions, too.
"""

"""Shards: the samples of a snapshot packed into ordinary WebDataset tars or TFRecords, each with an index of its samples.

Formats, the index, building and reading. Nothing here knows of PyTorch or TensorFlow.
"""

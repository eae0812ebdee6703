"""Shards: the samples of a snapshot packed into ordinary WebDataset tars or TFRecords, with an index of the samples.

Formats, the index, building and reading. Nothing here knows of PyTorch or TensorFlow.
"""

"""Feeding a training: the order of samples, datasets over snapshots and shards, lookahead, elastic tasks.

Users import `datacache.torch` and `datacache.tf`, which put these parts together. What needs PyTorch or TensorFlow says
so in its docstring; the rest works without them.
"""

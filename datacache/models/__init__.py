"""Models in the loop: predicting on a snapshot, evaluating what was predicted, loading weights at disk speed.

Users reach it through `datacache.torch`, `datacache.safetensors` and `datacache.api`.
"""

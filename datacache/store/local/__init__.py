"""Folders as object stores and as buckets: `file://`."""

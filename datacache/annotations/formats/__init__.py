"""Formats of annotations: read into the one model, and written from it."""

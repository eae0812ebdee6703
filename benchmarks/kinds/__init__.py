"""Forty small data sets of every kind of annotation, and the tools they are given to: see `kinds_peers`."""

"""Leaf package: errors, ids, block geometry, concurrency primitives and metric names.

Everything may import it; it imports nothing of this project.
"""

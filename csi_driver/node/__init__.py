"""The node's side of the driver: volumes mounted, bound into pods, and mended."""

"""What the programs in `examples/` and `dsctl demo` share: a detector of boxes, how well it does, its training.

An example, not an interface: it may change with any version. Nothing else in the package imports it. Needs PyTorch.
"""

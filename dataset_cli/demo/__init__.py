"""The parts that `dsctl demo` and `examples/` share: drawn faces, a small detector, its training, its story."""

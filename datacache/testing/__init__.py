"""Conformance suites for backends, and sample data, for tests and the demo; needs pytest or Pillow."""

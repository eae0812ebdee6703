"""Conformance suites for backends, and sample data: for tests and the demo. Suites need pytest, data Pillow."""

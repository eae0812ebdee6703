"""Conformance suites that every store, tier and catalog runs, sample data, and fault injection. Needs pytest."""

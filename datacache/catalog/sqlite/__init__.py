"""The embedded catalog: one SQLite file, for one node."""

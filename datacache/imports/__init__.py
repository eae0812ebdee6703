"""Imports: snapshots made of what does not lie in one bucket under its own name.

`jsonl` takes a list of URLs (one JSON object a line), `export` an archive, folder or file that an annotation tool
wrote. Both are used by `api`. Nothing is visible before their commit, and what they are given is never trusted.
"""

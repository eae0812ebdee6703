"""Manifests: a snapshot's files as sorted, content-addressed ranges.

`model` says what an entry, a range and a root are; `codec` turns ranges and roots into bytes and back; `builder` makes
a manifest from a listing; `reader` finds rows and paths in one, loading ranges as they are needed; `view` is the
directory tree over them.
"""

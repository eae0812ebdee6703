"""The catalog: datasets, their snapshots and tags, and the manifest blobs they are made of.

`base` is the protocol, `sqlite` and `mongo` implement it, `refs` resolves `name@ref`. The two backends run
one conformance suite (`datacache/testing/catalog.py`).
"""

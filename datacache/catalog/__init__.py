"""The catalog: datasets, their snapshots and tags, and the blobs they are made of.

`base` is the protocol, `sqlite` and `mongo` implement it, `refs` resolves `name@ref`. `create`, `commit` and `copy`
make snapshots; `packs` and `objects` keep new files; `compare` and `verify` look at snapshots; `gc` removes what none
needs. The two backends run one conformance suite (`tests/conformance/catalog.py`).
"""

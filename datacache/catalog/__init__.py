"""The catalog: datasets, their snapshots and tags, and the blobs they are made of.

`base` is the protocol, `sqlite` and `mongo` implement it, `refs` resolves and compares references. `create` and
`commit` make snapshots; `packs` and `objects` keep new files; `verify` looks at what snapshots refer to; `gc` removes
what none needs. The two backends run one conformance suite (`tests/conformance/catalog.py`).
"""

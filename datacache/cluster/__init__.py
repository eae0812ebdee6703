"""A cluster of caches: which nodes there are, and which of them owns a block.

`members` says who is there, from a list in the settings or by leases in the catalog's MongoDB (`mongo_members`);
`placement` computes who owns a block. There is no consensus: ids are immutable and bytes are checksummed, so two nodes
that see different members at a moment fetch a block once more than they need, and nothing worse.
"""

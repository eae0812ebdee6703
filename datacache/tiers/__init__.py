"""Local tiers: RAM (a tmpfs) and SSD, both made of containers found through one LMDB index.

A *container* is a region (many small blocks, append-only) or an object file (the blocks of one large object at their
own offsets). Only the daemon writes (`writer`, `tier`, `recovery`); every process of the node reads directly
(`local`).
"""

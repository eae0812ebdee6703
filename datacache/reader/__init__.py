"""Reading a snapshot: (path, range) → blocks → bytes.

`snapshot` is what users hold; it knows only a `BlockSource`. `blocks` is the source every process of a node uses: its
tiers, then the daemon, then, if there is none, the store itself.
"""

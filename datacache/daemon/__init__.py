"""The node's cache daemon: the only process that writes the tiers, and the one that fetches each block once.

`server` speaks HTTP on a Unix socket, `fetcher` schedules the gets, `warmer` fills whole snapshots,
`lookahead` follows published orders, with `clairvoyant` choosing what goes for them; `client` is what
every other process uses, and starts the daemon when there is none.
"""

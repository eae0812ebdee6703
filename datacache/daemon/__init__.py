"""The node's cache daemon: the only process that writes the tiers, and the one that fetches each block once.

`server` answers requests on a Unix socket, `fetcher` schedules the gets, `warmer` fills whole snapshots, `orders`
follows published orders; every other process uses `client`, which starts the daemon when there is none.
"""

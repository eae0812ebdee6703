"""Blocks on their way between processes and nodes: one framed, binary protocol over Unix sockets and TCP.

`frames` says what a frame is, `server` and `client` are the two ends, `wire` holds what requests and errors look like.
"""

"""Copies on a second node's disk of what read-write mounts acknowledge: `lease`, `sender`, `receiver`."""

"""What read-write mounts acknowledge, on a second node's disk as well: `lease`, `sender`, `receiver`."""

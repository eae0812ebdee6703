"""The kernel's side: the FUSE protocol, and mounting and unmounting."""

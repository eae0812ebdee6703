"""A snapshot as a file system, and the workers that answer the kernel from it."""

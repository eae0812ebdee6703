"""Object stores behind one protocol: list a prefix, read a range of one exact version, write small things.

`open_store(url)` picks the backend: S3, Google and Azure through obstore, folders through the kernel, every other URL
through fsspec.
"""

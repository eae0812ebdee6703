"""The write path: what is written to a live bucket is made durable in a staging folder first and uploaded then.

`model` says what is pending; `journal` and `staging` keep it on durable storage; `overlay` is all that differs from
the bucket; `engine` puts these together; `uploader` brings the differences to the bucket. Nothing here knows of FUSE or
of the read cache. `fuse_mount/bucket/fs/bucket_fs.py` is what shows bucket and differences as one directory.
"""

"""The file system of a read-write mount. It knows nothing of FUSE; `bucket_fs.BucketFs` is its front."""

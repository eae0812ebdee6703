"""The uploader: bring each pending key to the bucket, in the background, and settle conflicts."""

"""Imported by every Python that has this folder on its PYTHONPATH: uploads are cut into parts that tests can fill."""

import os

from datacache.store.s3.bucket import S3Bucket

S3Bucket.whole_bytes = S3Bucket.part_bytes = int(os.environ["TEST_PART_BYTES"])

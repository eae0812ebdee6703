"""Imports the libraries that S3 needs, which takes some tenths of a second: for a daemon to have done before the first
fetch, in a thread. Nothing else."""

from __future__ import annotations

import botocore.credentials
import botocore.session
import obstore.store

import datacache.store.s3.store

__all__ = ["botocore", "datacache", "obstore"]

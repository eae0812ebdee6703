"""Snapshots and shard sets as `tf.data` pipelines."""

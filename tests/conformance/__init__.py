"""Suites that every backend passes (stores, buckets, catalogs, tasks), and the proxy that injects faults."""

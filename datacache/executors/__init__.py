"""Engines that work is spread over, by what a user calls them: `open_workers`.

Dask and Ray are imported when one of them is asked for. One thread.
"""

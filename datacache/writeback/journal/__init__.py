"""The journal of a staging area: keyed records, durable when `commit` returns, replayed at the next start."""

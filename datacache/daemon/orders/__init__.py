"""Orders of reading that loaders publish: lookahead, epoch plans, and the eviction they allow."""

"""Task queues in the catalog's database: the protocol of a storage, and its backends."""

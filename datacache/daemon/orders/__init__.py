"""Published orders: what trainings will read, fetched ahead of them and kept for them."""

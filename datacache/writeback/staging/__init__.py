"""Staging areas: durable folders that hold writes until the bucket has them, with their files and quota."""

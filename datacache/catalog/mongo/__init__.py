"""The shared catalog: a MongoDB database."""

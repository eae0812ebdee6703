"""The controller's side of the driver: which volume a claim gets."""

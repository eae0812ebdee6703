"""Messages on the wire: generated from the `.proto` files beside this by `scripts/generate_protos.sh`."""

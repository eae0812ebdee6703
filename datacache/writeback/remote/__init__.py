"""The bucket as this node knows it: what was listed or asked for, and the requests that ask for more."""

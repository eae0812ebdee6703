"""DataSet resources of Kubernetes: snapshots as somebody wants them in Git, made by Jobs.

`resource` reads a resource, `runs` writes its Jobs and reads how they ended, `grants` says what its namespace may have,
`reconciler` does all of it again and again. Only `reconciler` is used from outside.
"""

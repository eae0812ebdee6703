"""The CSI driver: a data set in a pod by one annotation.

The flow, in one direction:

    PVC ─annotation─▶ controller: `volumes`, `resolve` ─▶ PV with the snapshot's id ─▶ node: one mount a snapshot
    (`mounts`, made by `fuse_mount`) ─bind (`binds`)─▶ pod

`python -m csi_driver` is one gRPC server on a Unix socket (`server`) with the services of the Container Storage
Interface: identity (`server`), `controller`, `node`; `wire` has their messages. Mounts are never its children: it can
be restarted or replaced, and nobody who reads notices.
"""

DRIVER_NAME = "datacache.io"
"""The driver's name in CSIDriver, StorageClass and PersistentVolume, and the prefix of annotations."""

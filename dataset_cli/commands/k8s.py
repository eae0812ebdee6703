"""`dsctl k8s`: what to give to `kubectl apply`, and what the catalog keeps of volumes that nobody provisioned and of
DataSet resources.

With `--json`, `pvc` prints a `List` of the same objects, which kubectl takes as well; `forget` `{"handle", "known"}`;
`assign` `{"name", "resource"}`, where the resource is null for none.
"""

from __future__ import annotations

from typing import Any

import click

from datacache import api
from dataset_cli.app import App, DatasetName, command
from dataset_cli.commands.k8s_job import job
from dataset_cli.commands.quota import quota
from dataset_cli.manifests import RESTRICTED_CONTAINER, as_yaml, checked_name, checked_size, name_of, restricted_pod

_DATASET_CLASS, _BUCKET_CLASS = "datacache-dataset", "datacache-bucket"
_QUOTA = "100Gi"
_MIB = 2**20
_POD_IMAGE = "busybox:1.37.0"


@click.group()
def k8s() -> None:
    """Print PVCs and Jobs, set quotas, assign data sets, forget PVs."""


k8s.add_command(quota)


k8s.add_command(job)


@command(k8s)
@click.argument("what", metavar="REF|URL")
@click.option("--name", callback=checked_name, help="Name of the PVC (default: made from REF or URL, and --subpath).")
@click.option("--namespace", callback=checked_name, help="Its namespace (default: kubectl's).")
@click.option("--storage-class", help=f"Its StorageClass (default: {_DATASET_CLASS}, of a bucket {_BUCKET_CLASS}).")
@click.option(
    "--warm", type=click.Choice(["true", "wait"]), help="Fetch all of it on each node; wait: before pods run."
)
@click.option("--pin", is_flag=True, help="Never evict its data while it is on a node.")
@click.option("--subpath", default="", help="Only this folder of it.")
@click.option("--by-id", is_flag=True, help="Name the snapshot by its id, which no tag can move.")
@click.option("--pinned-id", is_flag=True, hidden=True)  # its former name
@click.option("--size", callback=checked_size, help=f"Of a bucket: the quota (default: {_QUOTA}).")
@click.option("--with-pod", is_flag=True, help="Print a pod that lists it, too; near its data.")
def pvc(
    app: App,
    /,
    *,
    what: str,
    name: str | None,
    namespace: str | None,
    storage_class: str | None,
    warm: str | None,
    pin: bool,
    subpath: str,
    by_id: bool,
    pinned_id: bool,
    size: str | None,
    with_pod: bool,
) -> None:
    """Print a PVC of a snapshot (read-only) or of a bucket's prefix (read-write), to apply:

    \b
    dsctl k8s pvc mask@v3 | kubectl apply -f -
    dsctl k8s pvc s3://runs/exp-7 --size 500Gi | kubectl apply -f -
    """
    if subpath.startswith("/") or ".." in subpath.split("/"):
        raise click.UsageError("--subpath is a folder inside, without '..' and without a slash before it")
    subpath = "/".join(part for part in subpath.split("/") if part not in ("", "."))
    by_id |= pinned_id
    if "://" in what:
        if warm or pin or by_id:
            raise click.UsageError("--warm, --pin and --by-id are for snapshots: a bucket's content changes")
        url = "/".join(api.split_url(what)).rstrip("/")
        annotations, size = {"bucket": url}, size or _QUOTA
        default, access, class_ = url.partition("://")[2], "ReadWriteMany", _BUCKET_CLASS
        preferred: list[dict[str, Any]] = []
    else:
        if size:
            raise click.UsageError("--size is for buckets: a snapshot has the size that it has")
        record = app.resolve(what)
        ref = f"{record.dataset}@{record.id}" if by_id else str(api.parse_ref(what))
        annotations = {"dataset": ref} | ({"warm": warm} if warm else {}) | ({"pin": "true"} if pin else {})
        default, access, class_ = what, "ReadOnlyMany", _DATASET_CLASS
        preferred = api.preferred_nodes({record.id: record.total_bytes})
        size = f"{max(1, -(-record.total_bytes // _MIB))}Mi"
    if subpath:
        annotations["subpath"] = subpath
    name = name or name_of(f"{default}/{subpath}")
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata | {"annotations": {f"datacache.io/{key}": text for key, text in annotations.items()}},
        "spec": {
            "accessModes": [access],
            "storageClassName": storage_class or class_,
            "resources": {"requests": {"storage": size}},
        },
    }
    objects = [claim, *([_pod(metadata, preferred, read_only=access == "ReadOnlyMany")] if with_pod else [])]
    listed: dict[str, Any] = {"apiVersion": "v1", "kind": "List", "items": objects}
    app.out.result(listed, as_yaml(objects))


@command(k8s)
@click.argument("handle", metavar="VOLUMEHANDLE")
def forget(app: App, /, *, handle: str) -> None:
    """Have the reference of a PV that was written by hand resolved anew.

    The first node that mounts such a PV writes down which snapshot its reference means, under its volumeHandle, for all
    that come later. Before the PV is made anew under the same volumeHandle, for what a tag says by now, delete the
    old one and its pods, and forget it:

    \b
    dsctl k8s forget mask-latest
    """
    with app.catalog() as catalog:
        known = api.forget_volume(catalog, handle)
    words = "its reference is resolved anew when it is mounted next" if known else "nothing is known of it"
    app.out.result({"handle": handle, "known": known}, f"{handle}: {words}")


@command(k8s)
@click.argument("name", type=DatasetName())
@click.argument("resource", metavar="[NAMESPACE/NAME]", required=False)
@click.option("--none", "to_none", is_flag=True, help="Take it from the one that has it.")
def assign(app: App, /, *, name: str, resource: str | None, to_none: bool) -> None:
    """Show which DataSet resource makes a data set's versions, or give it to another one.

    A DataSet gets a name that nobody has, and keeps it when it is deleted. One that a person has made, or that is
    another namespace's, it gets by this alone:

    \b
    dsctl k8s assign mask team-a/faces
    """
    if resource and to_none:
        raise click.UsageError("name a resource, or --none")
    with app.catalog() as catalog:
        if resource or to_none:
            api.assign(catalog, name, resource or "")
        found = api.assigned_to(catalog, name)
        if resource and catalog.dataset(name) is None:
            app.out.warning(f"there is no dataset {name!r} yet: {found} makes the first version")
    words = f"is made by the DataSet {found}" if found else "is made by no DataSet"
    app.out.result({"name": name, "resource": found or None}, f"{name} {words}")


def _pod(metadata: dict[str, str], preferred: list[dict[str, Any]], *, read_only: bool) -> dict[str, Any]:
    """Return a pod that lists the volume, as a user that owns nothing, on a node that it would rather be on."""
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    volume: dict[str, Any] = {"name": "data", "persistentVolumeClaim": {"claimName": metadata["name"]}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            "restartPolicy": "Never",
            **({"affinity": affinity} if preferred else {}),
            "securityContext": restricted_pod(1000),
            "containers": [
                {
                    "name": "list",
                    "image": _POD_IMAGE,
                    "command": ["ls", "-l", "/data"],
                    "securityContext": RESTRICTED_CONTAINER,
                    "volumeMounts": [
                        {"name": "data", "mountPath": "/data", "mountPropagation": "HostToContainer"}
                        | ({"readOnly": True} if read_only else {})
                    ],
                }
            ],
            "volumes": [volume],
        },
    }

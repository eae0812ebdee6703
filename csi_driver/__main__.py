"""The driver's process: `python -m csi_driver --endpoint unix:///csi/csi.sock --node-id NODE`.

Exit code 0 after SIGTERM or SIGINT, 2 for wrong usage, 1 for anything else. No mount ends with it.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from datacache.core.errors import DatacacheError, SettingsError
from datacache.core.logs import set_level

if TYPE_CHECKING:
    from csi_driver.kube import KubeApi
    from csi_driver.node.service import NodeService
    from datacache.settings import Settings

DESCRIPTION = """\
The CSI driver of datacache: data sets and buckets as volumes of Kubernetes.

The controller runs once in a cluster, beside csi-provisioner; the node part on every node; one process can be both.
Where everything lies, and the catalog, is set as for all of datacache (DATACACHE_HOME, DATACACHE_CATALOG, …).
"""
_OTHERS = ("kubernetes", "urllib3", "pymongo", "botocore", "asyncio")
"""Libraries whose log is of no use below warnings."""
_log = logging.getLogger("csi_driver")


def main() -> int:
    """Serve until told to end, and return the exit code."""
    arguments = _parser().parse_args()
    if arguments.mode != "controller" and not arguments.node_id:
        _parser().error(f"--mode {arguments.mode} needs --node-id NAME, the node's name in Kubernetes")
    if arguments.webhook_port is not None and arguments.webhook_tls is None:
        _parser().error("--webhook-port needs --webhook-tls DIR: the API server speaks TLS only")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for name in _OTHERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    # What it starts (mounts) must not run gRPC's handlers in a forked child: they want all its threads at rest.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        _serve(arguments)
    except DatacacheError as exc:
        sys.stderr.write(f"error: {exc}\nhint: {exc.hint}\n" if exc.hint else f"error: {exc}\n")
        return 1
    except ModuleNotFoundError as exc:
        if str(exc.name).partition(".")[0] not in ("grpc", "google", "kubernetes"):
            raise
        sys.stderr.write(f"error: the package {exc.name} is not installed\nhint: pip install 'dsctl[k8s]'\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m csi_driver",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--endpoint",
        required="CSI_ENDPOINT" not in os.environ,
        default=os.environ.get("CSI_ENDPOINT"),
        type=_socket,
        metavar="unix://SOCKET",
        help="the socket to answer on, such as unix:///csi/csi.sock; by default what CSI_ENDPOINT says",
    )
    parser.add_argument("--node-id", default="", metavar="NAME", help="this node's name in Kubernetes (spec.nodeName)")
    parser.add_argument(
        "--mode",
        choices=("all", "controller", "node"),
        default="all",
        help="which services: the controller's, the node's, or both (default)",
    )
    parser.add_argument(
        "--register",
        type=Path,
        metavar="DIR",
        help="register with the kubelet: DIR is its folder plugins_registry, seen from here",
    )
    parser.add_argument(
        "--kubelet-endpoint",
        metavar="PATH",
        help="the path of SOCKET as the kubelet sees it, where that differs; with --register",
    )
    parser.add_argument(
        "--kubeconfig",
        type=Path,
        metavar="FILE",
        help="how to reach the Kubernetes API, for the annotations of PVCs; in a cluster its own API is used; with "
        "neither, only the parameters of StorageClasses count",
    )
    parser.add_argument(
        "--allow-bucket",
        action="append",
        default=[],
        metavar="PREFIX",
        help="a bucket, or a prefix in one (s3://lab/${pvc.namespace}), that every PVC and inline volume may name "
        "and that is mounted with the driver's own credentials; '*' allows all; can be given several times. Others "
        "need a StorageClass with a secret (csi.storage.k8s.io/node-stage-secret-name)",
    )
    parser.add_argument(
        "--label-nodes",
        action="store_true",
        help="of a controller: label the nodes with what they hold of snapshots (cache.datacache.io/…), so that pods "
        "can prefer nodes where their data is",
    )
    parser.add_argument(
        "--datasets",
        type=_pod_template,
        metavar="NAMESPACE/NAME",
        help="serve DataSet resources; the PodTemplate of the Jobs that make their snapshots, with a container dsctl",
    )
    parser.add_argument(
        "--dataset-source",
        action="append",
        default=[],
        metavar="PREFIX",
        help="a bucket, or a prefix in one, that DataSets may name beside those of --allow-bucket; written in the same "
        "way, several times",
    )
    parser.add_argument(
        "--webhook-port",
        type=int,
        metavar="N",
        help="of a controller: answer admission reviews of pods on this TCP port, so that those with data sets prefer "
        "nodes where these are; with --webhook-tls",
    )
    parser.add_argument(
        "--webhook-tls", type=Path, metavar="DIR", help="a folder with tls.crt and tls.key, which may come later"
    )
    parser.add_argument("--metrics-port", type=int, metavar="N", help="serve metrics for Prometheus on this TCP port")
    parser.add_argument(
        "--metrics-address",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="of this IP address (default: 127.0.0.1); '*': of all, where a NetworkPolicy says who may ask",
    )
    return parser


def _socket(text: str) -> Path:
    scheme, separator, rest = text.partition("://")
    if not separator and text.startswith("/"):
        scheme, rest = "unix", text
    if scheme != "unix" or not rest.startswith("/") or rest.endswith("/"):
        raise argparse.ArgumentTypeError(f"{text!r} is no Unix socket: write unix:///PATH/csi.sock, with a whole path")
    return Path(rest)


def _pod_template(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+/[a-z0-9.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no PodTemplate: write NAMESPACE/NAME")
    return text


def _serve(arguments: argparse.Namespace) -> None:
    # A pipe: signals that are blocked for sigwait would be blocked in mounts that are started from here, too.
    told, tell = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: os.write(tell, bytes([number])) and None)

    from csi_driver import DRIVER_NAME
    from csi_driver.controller import ControllerService
    from csi_driver.kube import open_api
    from csi_driver.metrics import COUNTS
    from csi_driver.node.service import NodeService
    from csi_driver.resolve import BucketRules
    from csi_driver.server import IdentityService, RegistrationService, Server
    from csi_driver.wire import csi_pb2, registration_pb2
    from datacache.settings import load_settings

    _check_paths(arguments)
    settings = load_settings().for_others()
    set_level(settings.log_level)
    # The package kubernetes is imported by the first call: a node's Events on pods come up once in a while.
    rules, api = BucketRules(arguments.allow_bucket), open_api(arguments.kubeconfig)
    ended: list[bool] = []
    node: NodeService | None = None
    services: dict[str, object] = {"Identity": IdentityService()}
    with ExitStack() as stack:
        if arguments.mode != "node":
            if api is None:
                _log.warning("there is no Kubernetes API here and no --kubeconfig: annotations of PVCs are not read")
            else:
                api.warm_up()
            if arguments.label_nodes:
                _label_nodes(settings, api, stack)
            if arguments.webhook_port is not None:
                _serve_webhook(arguments, settings, api, stack)
            services["Controller"] = stack.enter_context(closing(ControllerService(settings, api, rules)))
            if arguments.datasets is not None:
                _serve_datasets(arguments, settings, api, stack)
        if arguments.mode != "controller":
            services["Node"] = node = stack.enter_context(closing(NodeService(settings, arguments.node_id, rules, api)))
            node.start()
        server = Server(arguments.endpoint, csi_pb2.DESCRIPTOR, services, count=COUNTS.call)
        stack.callback(lambda: ended.append(server.close()))
        server.start()
        if arguments.register is not None:
            # Once the driver answers.
            of_kubelet = {"Registration": RegistrationService(arguments.kubelet_endpoint or str(arguments.endpoint))}
            place = arguments.register / f"{DRIVER_NAME}-reg.sock"
            registration = Server(place, registration_pb2.DESCRIPTOR, of_kubelet)
            stack.callback(registration.close, patience_s=1.0)
            registration.start()
        if arguments.metrics_port is not None:
            _serve_metrics(arguments, node, settings, stack)
        _log.info("answering on %s (%s)", arguments.endpoint, ", ".join(services))
        received = os.read(told, 1)[0]
        _log.info("ending on %s; mounts stay", signal.Signals(received).name)
    if ended == [False]:
        # Python would wait for the threads of these calls, and for what they wait for.
        logging.shutdown()
        os._exit(0)


def _check_paths(arguments: argparse.Namespace) -> None:
    if arguments.register is not None and not arguments.register.is_dir():
        raise SettingsError(
            f"--register {arguments.register}: there is no such folder",
            hint="It is the kubelet's, /var/lib/kubelet/plugins_registry, mounted from the host.",
        )
    if arguments.mode != "node" and arguments.kubeconfig is not None and not arguments.kubeconfig.is_file():
        raise SettingsError(f"--kubeconfig {arguments.kubeconfig}: there is no such file")


def _label_nodes(settings: Settings, api: KubeApi | None, stack: ExitStack) -> None:
    from csi_driver.node_labels import NodeLabels

    if api is None:
        raise SettingsError("--label-nodes needs a Kubernetes API", hint="Run it in a cluster, or with --kubeconfig.")
    labels = stack.enter_context(closing(NodeLabels(settings, api)))
    labels.start()


def _serve_datasets(arguments: argparse.Namespace, settings: Settings, api: KubeApi | None, stack: ExitStack) -> None:
    from csi_driver.datasets.reconciler import DatasetReconciler
    from csi_driver.resolve import BucketRules

    if api is None:
        raise SettingsError("--datasets: there is no Kubernetes API here", hint="Name one with --kubeconfig FILE.")
    rules = BucketRules([*arguments.allow_bucket, *arguments.dataset_source])
    reconciler = stack.enter_context(closing(DatasetReconciler(settings, api, rules, arguments.datasets)))
    reconciler.start()


def _serve_webhook(arguments: argparse.Namespace, settings: Settings, api: KubeApi | None, stack: ExitStack) -> None:
    from csi_driver.webhook import PodPlacement, WebhookServer

    placement = stack.enter_context(closing(PodPlacement(settings, api)))
    try:
        server = WebhookServer(arguments.webhook_port, arguments.webhook_tls, placement.review)
    except (OSError, OverflowError) as exc:
        raise SettingsError(
            f"--webhook-port {arguments.webhook_port}: {exc}", hint="Name a TCP port that nobody listens on."
        ) from exc
    stack.callback(server.close)


def _serve_metrics(
    arguments: argparse.Namespace, node: NodeService | None, settings: Settings, stack: ExitStack
) -> None:
    from csi_driver.metrics import MetricsServer, NodeMetrics
    from csi_driver.server import probe

    try:
        shown = None if node is None else NodeMetrics(settings, node.records)
        metrics = MetricsServer(
            arguments.metrics_port, shown, address=arguments.metrics_address, problem=lambda: probe(arguments.endpoint)
        )
    except (OSError, OverflowError) as exc:
        raise SettingsError(
            f"--metrics-port {arguments.metrics_port} of {arguments.metrics_address}: {exc}",
            hint="Name a TCP port that nobody listens on, and an address of this machine.",
        ) from exc
    stack.callback(metrics.close)


if __name__ == "__main__":
    sys.exit(main())

"""Starts workers as torchrun does, and starts them again within a second. See README.md beside this file.

python examples/elastic_training/launch.py --nodes 1:4 --workers 1 --endpoint 127.0.0.1:29400 -- --out ./elastic

A worker that torchrun starts spends some five seconds of a core on importing PyTorch, each time that somebody comes or
goes. Here workers are forked from the agent, which has done so.
"""

from __future__ import annotations

import argparse
import os

import torch._dynamo  # an optimizer needs it, and importing it takes a second  # noqa: F401
import train
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

# Without this, PyTorch 2.13 keeps the store of the first round, in which restarted workers find the addresses of dead
# ones. To be set for torchrun, too.
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

RENDEZVOUS = {
    "is_host": False,  # the store is in a process of its own, which outlives each of the agents
    "last_call_timeout": 1,  # seconds that a round waits for more nodes than the least
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 5,  # seconds until a node that was not heard of is left out
}


def main(options: argparse.Namespace) -> None:
    least, _, most = options.nodes.partition(":")
    config = LaunchConfig(
        min_nodes=int(least),
        max_nodes=int(most or least),
        nproc_per_node=options.workers,
        run_id=options.id,
        rdzv_backend="c10d",
        rdzv_endpoint=options.endpoint,
        rdzv_configs=RENDEZVOUS,
        max_restarts=1000,
        start_method="fork",
    )
    elastic_launch(config, train.main)(train.arguments(options.arguments), os.getpid())


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Start workers of an elastic training.")
    add = parser.add_argument
    add("--nodes", default="1:4", metavar="LEAST:MOST", help="how many of these agents there may be")
    add("--workers", type=int, default=1, help="of this agent (default: %(default)s)")
    add("--endpoint", required=True, metavar="HOST:PORT", help="where the store is in which they meet")
    add("--id", default="elastic", help="of the training, for all its agents (default: %(default)s)")
    add("arguments", nargs="*", help="of train.py, behind --")
    return parser.parse_args(given)


if __name__ == "__main__":
    main(arguments())

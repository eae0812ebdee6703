"""Hit rates of the eviction policies when every epoch is shuffled anew and the cache holds a part of the data set.

A hit is a read that no GET at the object server answered: the server's own log is counted. `clairvoyant` reads with the
order published, this epoch's and the next one's; GETs ahead of the last epoch's end are not counted.

What an epoch reads: `all` (every file once), `half` (what one of two nodes reads: another random half each time), or
`weighted` (as many files as there are, drawn with weights, as samplers against imbalance do).

Expected for `all` and a cache of a share c: `keep` c (it never evicts), which no policy can exceed: each file is read
once an epoch, so the hits of an epoch are at most what is cached when it begins. `lru` c + (1 - c) ln(1 - c), the
probability that fewer than c of the objects were used between two uses of one in independent random orders, if single
objects went.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from typing import Any

from benchmarks.harness import OBJECT_BYTES, ResultTable, Workspace, make_files, parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=5000)
    arguments.add_argument("--size", type=int, default=OBJECT_BYTES, help="bytes of an object")
    arguments.add_argument("--share", type=float, default=0.5, help="cache size / data set size")
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--policies", nargs="+", default=["keep", "lru", "clairvoyant"])
    arguments.add_argument("--reads", nargs="+", default=["all", "half", "weighted"])
    arguments.add_argument("--pace", type=float, default=500.0, help="files that the training reads a second")
    args = arguments.parse_args()
    if args.quick:
        args.files, args.epochs, args.reads = 400, 2, ["all"]
    share = args.share
    expected = {"keep": share, "lru": share + (1 - share) * math.log(1 - share), "clairvoyant": share}
    with Workspace(args.dir) as work:
        server = work.s3(log_requests=True)
        make_files(server.make_bucket("images"), args.files, args.size)
        table = ResultTable(
            f"{args.files:,} objects × {args.size:,} bytes, cache {share:.0%}, hit rate",
            "reads", "policy", *(f"epoch {number + 1}" for number in range(args.epochs)), "expected",
        )  # fmt: skip
        for reads in args.reads:
            orders = make_orders(reads, args.files, args.epochs + 1)
            for policy in args.policies:
                total = args.files * args.size
                ssd_bytes = int(total * share)
                name = f"home-{reads}-{policy}"
                home = work.home(name, server.env(), eviction=policy, ram_bytes=0, ssd_bytes=ssd_bytes)
                home.dsctl("snapshot", "create", "images", "--from", "s3://images")
                with home.environment():
                    rates = measure(orders, policy, args.pace, lambda: server.get_count("images"))
                home.close()
                bound = expected.get(policy) if reads == "all" else None
                table.row(reads, policy, *(f"{rate:.1%}" for rate in rates), f"{bound:.1%}" if bound else None)
        table.print()


def make_orders(reads: str, files: int, epochs: int) -> list[Any]:
    """The rows that each epoch reads, in its order."""
    import numpy as np

    rng = np.random.default_rng(0)
    if reads == "half":
        return [rng.permutation(files)[: files // 2] for _ in range(epochs)]
    if reads == "weighted":
        weights = rng.pareto(1.5, files) + 0.2
        return [rng.choice(files, files, p=weights / weights.sum()) for _ in range(epochs)]
    return [rng.permutation(files) for _ in range(epochs)]


def measure(orders: list[Any], policy: str, pace: float, get_count: Any) -> list[float]:
    """The hit rate of each epoch but the last order's, which is only published. `pace` files a second are read."""
    from datacache import load_settings, open_snapshot
    from datacache.loaders.lookahead import PlanSource, publish

    settings, rates = load_settings(), []
    with open_snapshot("images@latest") as snap, contextlib.ExitStack() as plans:

        class WholeSnapshot:
            def plan_source(self) -> PlanSource:
                return PlanSource(snap.record.dataset, snap.record.id)

            def plan_items(self, samples: Any) -> Any:
                return samples.astype("uint32").reshape(-1, 1)

        paths = [path.decode() for path in snap.manifest.paths()]
        for order, following in itertools.pairwise(orders):
            before = get_count()
            if policy == "clairvoyant":
                ahead = publish(settings, WholeSnapshot(), order, next_order=following)
                ahead.wait_sent()
                plans.close()  # the one before
                plans.enter_context(ahead)
            started_s = time.monotonic()
            for place, row in enumerate(order.tolist()):
                if place % 10 == 0:
                    time.sleep(max(0.0, started_s + place / pace - time.monotonic()))
                if policy == "clairvoyant":
                    ahead.advance(place)
                snap.read(paths[row])
            rates.append(1 - (get_count() - before) / len(order))
    return rates


if __name__ == "__main__":
    main()

"""Hit rates of the eviction policies when every epoch is shuffled anew and the cache holds a part of the data set.

A hit is a read that no GET at the object server answered: the server's own log is counted. `clairvoyant` reads with the
order published, this epoch's and the next one's; GETs ahead of the last epoch's end are not counted.

What an epoch reads: `all` (every file once), `half` (what one of two nodes reads: another random half each time), or
`weighted` (as many files as there are, drawn with weights, as samplers against imbalance do).

Expected for `all` and a cache of a share c: `keep` c (it never evicts), which no policy can exceed: each file is read
once an epoch, so the hits of an epoch are at most what is cached when it begins. `lru` c + (1 - c) ln(1 - c), the
probability that fewer than c of the objects were used between two uses of one in independent random orders, if single
objects went. `--share` is cache size / data set size, `--pace` files that the training reads a second.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from typing import Any

from benchmarks.harness import OBJECT_BYTES, ResultTable, benchmark, make_files


def main() -> None:
    with benchmark(
        __doc__,
        files=(5000, 200),
        size=OBJECT_BYTES,
        share=0.5,
        epochs=(4, 2),
        policies=(["keep", "lru", "clairvoyant"], ["clairvoyant"]),
        reads=(["all", "half", "weighted"], ["all"]),
        pace=500.0,
    ) as (args, work):
        share = args.share
        expected = {"keep": share, "lru": share + (1 - share) * math.log(1 - share), "clairvoyant": share}
        server = work.s3(log_requests=True)
        make_files(server.make_bucket("images"), args.files, args.size)
        title = f"{args.files:,} objects × {args.size:,} bytes, cache {share:.0%}, hit rate"
        epochs = [f"epoch {number + 1}" for number in range(args.epochs)]
        table = ResultTable(title, "reads", "policy", *epochs, "expected")
        for reads in args.reads:
            orders = make_orders(reads, args.files, args.epochs + 1)
            for policy in args.policies:
                settings = {"eviction": policy, "ram_bytes": 0, "ssd_bytes": int(args.files * args.size * share)}
                home = work.home(f"home-{reads}-{policy}", server.env(), **settings)
                home.snapshot("images", "s3://images")
                with home.environment():
                    rates = measure(orders, policy, args.pace, lambda: server.get_count("images"))
                home.close()
                bound = expected.get(policy) if reads == "all" else None
                table.row(reads, policy, *(f"{rate:.1%}" for rate in rates), f"{bound:.1%}" if bound else None)
        table.print()


def make_orders(reads: str, files: int, epochs: int) -> list[Any]:
    """Return the rows that each epoch reads, in its order."""
    import numpy as np

    rng = np.random.default_rng(0)
    if reads == "half":
        return [rng.permutation(files)[: files // 2] for _ in range(epochs)]
    if reads == "weighted":
        weights = rng.pareto(1.5, files) + 0.2
        return [rng.choice(files, files, p=weights / weights.sum()) for _ in range(epochs)]
    return [rng.permutation(files) for _ in range(epochs)]


def measure(orders: list[Any], policy: str, pace: float, get_count: Any) -> list[float]:
    """Return the hit rate of each epoch but the last order's, which is only published."""
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

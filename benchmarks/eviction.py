"""Hit rates of the eviction policies when the cache holds half of the data set and every epoch is shuffled
anew.

A hit is a read that no GET at the object server answered: the server's own log is counted. Expected for a
cache of a share c: `keep` c (it never evicts), `lru` c + (1 - c) ln(1 - c), the probability that fewer than c
of the objects were used between two uses of one in independent random orders.
"""

from __future__ import annotations

import math
import random

from benchmarks.harness import OBJECT_BYTES, Table, Workspace, make_files, parser


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--files", type=int, default=5000)
    arguments.add_argument("--size", type=int, default=OBJECT_BYTES, help="bytes of an object")
    arguments.add_argument("--share", type=float, default=0.5, help="cache size / data set size")
    arguments.add_argument("--epochs", type=int, default=4)
    arguments.add_argument("--policies", nargs="+", default=["keep", "lru"])
    args = arguments.parse_args()
    if args.quick:
        args.files, args.epochs = 400, 2
    share = args.share
    expected = {"keep": share, "lru": share + (1 - share) * math.log(1 - share)}
    with Workspace(args.dir) as work:
        server = work.s3(log_requests=True)
        names = make_files(server.make_bucket("images"), args.files, args.size)
        table = Table(
            f"{args.files:,} objects × {args.size:,} bytes, cache {share:.0%}, hit rate",
            "policy", *(f"epoch {number + 1}" for number in range(args.epochs)), "expected",
        )  # fmt: skip
        for policy in args.policies:
            total = args.files * args.size
            home = work.home(f"home-{policy}", server.env(), eviction=policy, ram_bytes=0, ssd_bytes=int(total * share))
            home.dsctl("snapshot", "create", "images", "--from", "s3://images")
            rates: list[str] = []
            with home.environment():
                from datacache import open_snapshot

                with open_snapshot("images@latest") as snap:
                    for epoch in range(args.epochs):
                        order = random.Random(epoch).sample(names, len(names))
                        before = server.get_count("images")
                        for name in order:
                            snap.read(name)
                        rates.append(f"{1 - (server.get_count('images') - before) / len(names):.1%}")
            home.close()
            table.row(policy, *rates, f"{expected[policy]:.1%}" if policy in expected else None)
        table.print()


if __name__ == "__main__":
    main()

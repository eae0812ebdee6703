"""Compares trainings whose workers come and go with those of a fixed number. See README.md beside this file.

python examples/elastic_training/compare.py curves --out ./elastic --seeds 1       # then plot.py draws them
python examples/elastic_training/compare.py kills --out ./elastic --kills 20
python examples/elastic_training/compare.py share --out ./elastic
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from job import Job, count, make_queue, read_log

CHANGES = ((0.15, "add"), (0.3, "add"), (0.45, "kill worker"), (0.6, "kill agent"), (0.75, "kill agent"))
"""What happens to two workers, and at which part of the training: three, four, one is started again, three, two."""
RUNS = {"fixed 2": (2, ()), "fixed 4": (4, ()), "changing 2-4": (2, CHANGES)}


def main(options: argparse.Namespace) -> int:
    return {"curves": curves, "kills": kills, "share": share}[options.what](options)


def curves(options: argparse.Namespace) -> int:
    """Train with two workers, four, and two to four, for each seed; print the losses."""
    losses: dict[str, list[float]] = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for kind, (workers, changes) in RUNS.items():
            name = f"{kind.replace(' ', '-')}-seed{seed}"
            result = run(options, name, workers, changes, seed=seed)
            curve = [[line["used"], line["loss"] / len(line["records"])] for line in steps(options.out, name)]
            (options.out / f"{name}.curve").write_text(json.dumps({"kind": kind, **result, "curve": curve}))
    for path in sorted(options.out.glob("*.curve")):
        found = json.loads(path.read_text())
        losses.setdefault(found["kind"], []).append(found["loss"])
    print(f"{'':14} {'test loss':>9}  of each seed")
    for kind, values in losses.items():
        print(f"{kind:14} {sum(values) / len(values):9.4f}  {' '.join(f'{value:.4f}' for value in values)}")
    changing, *fixed = losses["changing 2-4"], losses["fixed 2"], losses["fixed 4"]
    furthest = max(abs(one / other - 1) for each in fixed for one, other in zip(changing, each, strict=True))
    print(f"the changing ones end at most {furthest:.2%} from a fixed one of their seed")
    return 0


def steps(out: Path, name: str) -> list[dict[str, Any]]:
    """Return what the first worker logged of the steps, by the records that the training had used."""
    lines = [line for line in read_log(out, name) if line["rank"] == 0 and line.get("records")]
    return sorted(lines, key=lambda line: (line["used"], line["time"]))


def run(options: argparse.Namespace, name: str, workers: int, changes: Any = (), *, seed: int = 0) -> dict[str, Any]:
    """Train once, from the first worker to the last task. Return the result, with the seconds that it took."""
    total = prepare(options, name, seed)
    begun = time.monotonic()
    nodes = workers if changes else 1  # a node of several workers starts faster than several nodes
    with start(options, name, seed, workers=workers // nodes) as job:
        for _node in range(nodes):
            job.add()
        job.wait(lambda: job.world() == workers)
        for part, change in changes:
            job.wait(lambda part=part: job.used() >= part * total)
            say(name, f"{change} at {job.used():,} of {total:,} records")
            if change == "add":
                job.add()
            elif change == "kill agent":
                job.kill_agent(0)
            else:
                job.kill_worker(0)
            workers = len(job.agents)
            job.wait(lambda workers=workers: job.world() == workers)
        result = job.finish()
    used = count(options.out, name, total // options.epochs, options.epochs)
    say(name, f"loss {result['loss']:.4f}, {used}")
    return {**result, **used._asdict(), "seconds": time.monotonic() - begun}


def kills(options: argparse.Namespace) -> int:
    """Kill workers and agents again and again. Return 0 if each record was used as often as it may."""
    name, chance = f"kills{options.kills}-{options.first_seed}", random.Random(options.first_seed)
    total = prepare(options, name, options.first_seed)
    done: dict[str, int] = {"worker": 0, "agent": 0}
    with start(options, name, options.first_seed, workers=options.workers) as job:
        for _node in range(options.nodes):
            job.add()
        before = 0
        while sum(done.values()) < options.kills:
            job.wait(lambda before=before: job.used() > before + options.apart)
            if job.finished():
                break
            time.sleep(chance.uniform(0, 1) * options.pause)  # also while the next round is beginning
            before = job.used()
            victim = chance.randrange(len(job.agents))
            kind = ("worker", "agent")[sum(done.values()) % 2]
            if kind == "agent":
                job.kill_agent(victim)
                job.add()
            elif not job.kill_worker(victim):
                continue
            done[kind] += 1
            say(name, f"{kind} {victim} killed at {before:,} of {total:,} records")
        result = job.finish()
    used = count(options.out, name, total // options.epochs, options.epochs)
    most = (used.rounds - 1) * options.checkpoint_every * options.batch_size
    say(name, f"loss {result['loss']:.4f}; {done['worker']} workers and {done['agent']} agents killed; {used}")
    say(name, f"used for nothing: {used.again:,} of at most {most:,}")
    right = not used.missed and not used.repeated and used.again <= most and used.most <= used.rounds
    say(name, "each record was used as often as it may" if right else "WRONG")
    return 0 if right and sum(done.values()) == options.kills else 1


def share(options: argparse.Namespace) -> int:
    """Train two jobs, the second three times as long as the first, one after the other with two workers each; then both
    at once, each with one worker, and the second with another one as soon as the first is through. Print the seconds,
    from starting the first process to the last result. The queues are there before."""
    epochs = {1: options.epochs, 2: 3 * options.epochs}
    for number, many in epochs.items():
        for kind in ("alone", "shared"):
            prepare(options, f"{kind}{number}", number, epochs=many)
    begun = time.monotonic()
    for number in epochs:
        with start(options, f"alone{number}", number, workers=2) as job:
            job.add()
            job.wait(job.finished)
    alone_s = time.monotonic() - begun
    begun = time.monotonic()
    with start(options, "shared1", 1) as first, start(options, "shared2", 2) as second:
        first.add()
        second.add()
        first.wait(first.finished)
        say("share", f"the first is through, the second gets its worker at {second.used():,} records")
        second.add()
        second.wait(second.finished)
        shared_s = time.monotonic() - begun
    for kind in ("alone", "shared"):
        for number, many in epochs.items():
            say(f"{kind}{number}", str(count(options.out, f"{kind}{number}", options.count, many)))
    say("share", f"one after the other {alone_s:.1f} s, at once {shared_s:.1f} s: {shared_s / alone_s:.2f}")
    return 0


def prepare(options: argparse.Namespace, name: str, seed: int, *, epochs: int = 0) -> int:
    """Make the queue. Return how many records its epochs have."""
    about = {"out": options.out, "name": name, "count": options.count, "test": options.test}
    about |= {"epochs": epochs or options.epochs, "seed": seed}
    make_queue([f"--{key}={value}" for key, value in about.items()])
    return options.count * options.epochs


def start(options: argparse.Namespace, name: str, seed: int, *, workers: int = 1) -> Job:
    about = {"checkpoint-every": options.checkpoint_every, "batch-size": options.batch_size, "seed": seed}
    given = [f"--{key}={value}" for key, value in about.items()]
    given.append(f"--slow={options.slow}")
    return Job(options.out, name, workers=workers, torchrun=options.torchrun, options=given)


def say(name: str, text: str) -> None:
    print(f"{name}: {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare elastic trainings with others.")
    parser.add_argument("what", choices=["curves", "kills", "share"])
    add = parser.add_argument
    add("--out", type=Path, default=Path("elastic"), help="where all files go (default: %(default)s)")
    add("--seeds", type=int, default=1, help="how many trainings of each kind (default: %(default)s)")
    add("--first-seed", type=int, default=0)
    add("--kills", type=int, default=20)
    add("--nodes", type=int, default=3, help="of the training with kills (default: %(default)s)")
    add("--workers", type=int, default=1, help="of each of its nodes (default: %(default)s)")
    add("--pause", type=float, default=2.0, metavar="SECONDS", help="between kills, at most (default: %(default)s)")
    add("--apart", type=int, default=0, metavar="RECORDS", help="new ones between kills, at least")
    add("--slow", type=float, default=0.0, metavar="SECONDS", help="workers wait after each step")
    add("--count", type=int, default=8192, help="images of an epoch (default: %(default)s)")
    add("--test", type=int, default=4096, help="images of the test (default: %(default)s)")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=64)
    add("--checkpoint-every", type=int, default=10, metavar="STEPS")
    add("--torchrun", action="store_true", help="start agents with torchrun, not with launch.py")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(arguments()))

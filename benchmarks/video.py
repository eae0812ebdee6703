"""Images of the frames of a video of 720p: `dsctl snapshot create --frames` beside ffmpeg, which writes the same ones.

The video is drawn by ffmpeg: a moving test picture under noise, 30 frames a second, H.264 with B-frames, a key frame
every 250 frames at most. ffmpeg decodes with its own threads, and writes files into a folder; dsctl stores each image
durably.

Ten minutes take long. With `--made FOLDER` the video and the times of all runs stay there, so that each run may add a
few pairs of one rate, and the table has the medians of all of them:

    python -m benchmarks.video --made FOLDER --rates 1 --rounds 1
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from statistics import median

from benchmarks.harness import DSCTL, ResultTable, Workspace, benchmark, ratio, rounds_of
from benchmarks.usage import measured

Cost = tuple[float, float]
"""Seconds, and those of the processors."""


def make_video(path: Path, seconds: int) -> None:
    """Draw a video, unless it is there."""
    if path.exists():
        return
    unfinished = path.with_name(f"unfinished-{path.name}")
    picture = f"testsrc2=s=1280x720:r=30:d={seconds},noise=alls=8:allf=t,format=yuv420p"
    coded = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "26"]
    subprocess.run(["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", picture, *coded, unfinished], check=True)
    unfinished.rename(path)


class _Ways:
    """The two programs, each with a new place for its images at each run."""

    def __init__(self, work: Workspace, video: Path, rate: str) -> None:
        self._work, self._video, self._rate = work, video, rate
        self._runs = 0

    def ffmpeg(self) -> Cost:
        choose = f"setpts=PTS-STARTPTS,fps={self._rate}:round=up"
        out = self._work.folder(self._name("ffmpeg"))
        used = measured(["ffmpeg", "-v", "error", "-i", self._video, "-vf", choose, "-q:v", "2", out / "%06d.jpg"])
        return used.seconds, used.cpu_s

    def ours(self) -> Cost:
        home = self._work.home(self._name("home"), objects=self._work.folder(self._name("objects")))
        made = [DSCTL, "snapshot", "create", "frames", "--from", self._video, "--frames", f"fps={self._rate}"]
        used = measured(made, env=home.env)
        return used.seconds, used.cpu_s

    def _name(self, what: str) -> str:
        self._runs += 1
        return f"{what}-{self._rate.replace('/', '-')}-{self._runs}"


def main() -> None:
    """Run it."""
    with benchmark(__doc__, seconds=(600, 4), rounds=(3, 1), rates=(["1", "10", "30"], ["1"]), made="") as (args, work):
        folder = Path(args.made) if args.made else work.folder("made")
        folder.mkdir(parents=True, exist_ok=True)
        video = folder / f"{args.seconds}.mp4"
        make_video(video, args.seconds)
        table = ResultTable(
            f"JPEGs of the frames of {args.seconds} s of 720p at 30 frames a second",
            *(
                "images a second",
                "pairs",
                "ffmpeg s",
                "dsctl s",
                "speed",
                "ffmpeg CPU s",
                "dsctl CPU s",
                "speed by CPU",
            ),
        )
        for rate in args.rates:
            ways = _Ways(work, video, rate)
            found = rounds_of({"ffmpeg": ways.ffmpeg, "ours": ways.ours}, args.rounds)
            pairs = _with_former(folder / f"{args.seconds}-{rate.replace('/', '-')}.jsonl", found)
            theirs, ours = ([median(each) for each in zip(*costs, strict=True)] for costs in zip(*pairs, strict=True))
            wall, cpu = zip(theirs, ours, strict=True)
            table.row(rate, str(len(pairs)), *wall, ratio(*wall), *cpu, ratio(*cpu))
        table.print()


def _with_former(times: Path, found: dict[str, list[Cost]]) -> list[tuple[Cost, Cost]]:
    """Add pairs of runs to those of former times. Return all."""
    with open(times, "a+") as file:
        file.writelines(json.dumps(pair) + "\n" for pair in zip(found["ffmpeg"], found["ours"], strict=True))
        file.seek(0)
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    main()

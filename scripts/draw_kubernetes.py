"""Draws `docs/images/kubernetes.png`: what runs where, and how a PVC becomes a folder in a pod.

    python scripts/draw_kubernetes.py [FILE]

Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "kubernetes.png"
INK, MUTED = "#24292f", "#57606a"
POD, OURS, KEEPER, OUTSIDE, PLACE = "#ddf4ff", "#dafbe1", "#fff8c5", "#f6f8fa", "#ffffff"


def main() -> None:
    """Draw it."""
    figure, axes = plt.subplots(figsize=(12.6, 7.4), dpi=110)
    axes.set(xlim=(0, 126), ylim=(0, 74))
    axes.axis("off")

    _box(axes, (1, 40, 37, 32), "control plane", PLACE, top=True)
    _box(axes, (3, 61, 14, 7), "PVC", POD, "datacache.io/dataset:\nmask@v3")
    _box(axes, (22, 61, 14, 7), "PV", OUTSIDE, "dataset: mask@8f2c…\n(the whole id)")
    _box(axes, (3, 50.5, 14, 6), "csi-provisioner\ncsi-resizer", OUTSIDE)
    _box(axes, (22, 50.5, 14, 6), "driver", OURS, "--mode controller")
    _box(axes, (3, 42, 33, 5), "catalog (MongoDB)", OUTSIDE, "snapshots, manifests, who may have what")

    _box(axes, (1, 8, 20, 28), "outside", PLACE, top=True)
    _box(axes, (3, 14, 16, 14), "object store", OUTSIDE, "S3, Ceph, …:\nread, and written to")

    _box(axes, (42, 2, 83, 70), "node", PLACE, top=True)
    _box(axes, (44.5, 4.5, 48, 61), "pod of the DaemonSet (hostPID)", PLACE, top=True)
    _box(
        axes,
        (47, 47, 43, 12),
        "driver",
        OURS,
        "answers the kubelet, binds mounts into pods, mends;\nmay end and start again at any time",
    )
    _box(
        axes,
        (47, 28, 43, 13),
        "mounts",
        KEEPER,
        "one FUSE mount a snapshot or bucket prefix:\nsupervisor (keeps /dev/fuse) + worker;\nstages what is written",
    )
    _box(
        axes,
        (47, 8, 43, 14),
        "daemon",
        KEEPER,
        "fetches each block once, RAM and SSD;\n"
        "keeps every mount's /dev/fuse, too:\nwhichever of the two dies, the other brings it back",
    )

    _box(axes, (97, 54, 26, 9), "kubelet", OUTSIDE)
    _box(
        axes,
        (97, 30, 26, 16),
        "your pods",
        POD,
        "any user, read-only root:\n/data  the snapshot\n/runs  a bucket's prefix",
    )
    _box(axes, (97, 8, 26, 14), "/var/lib/datacache", OUTSIDE, "cache on SSD, staging area,\nrecords, sockets")

    _arrow(axes, (10, 61), (10, 56.5), "1")
    _arrow(axes, (17, 53.5), (22, 53.5), "2")
    _arrow(axes, (29, 50.5), (29, 47), "3")
    _arrow(axes, (15, 56.5), (22.5, 61.2), "4")
    _arrow(axes, (97, 57), (90, 54), "5")
    _arrow(axes, (68, 47), (68, 41), "6")
    _arrow(axes, (90, 48), (97, 43), "7")
    _arrow(axes, (97, 35), (90, 34.5), "8", both=True)
    _arrow(axes, (68, 28), (68, 22), "9", both=True)
    _arrow(axes, (47, 15), (19, 18), "10", both=True)
    _arrow(axes, (90, 15), (97, 15), "", both=True)
    _arrow(axes, (47, 32), (19, 24), "11")
    figure.tight_layout(pad=0.3)
    figure.savefig(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)


def _box(
    axes: Any,
    place: tuple[float, float, float, float],
    title: str,
    colour: str,
    text: str = "",
    *,
    top: bool = False,
) -> None:
    x, y, width, height = place
    style = "round,pad=0,rounding_size=1"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, fc=colour, ec=MUTED, lw=1.0))
    middle = x + width / 2
    if top:
        axes.text(middle, y + height - 2.6, title, ha="center", va="center", size=11, color=MUTED, weight="bold")
        return
    lines = text.count("\n") + 1 if text else 0
    title_y = y + height / 2 + 1.0 * lines
    axes.text(middle, title_y, title, ha="center", va="center", size=11, color=INK, weight="bold")
    if text:
        axes.text(middle, title_y - 1.7, text, ha="center", va="top", size=8.6, color=INK, linespacing=1.25)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], number: str, *, both: bool = False) -> None:
    style = "<|-|>" if both else "-|>"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=13, color=INK, lw=1.3, shrinkA=1, shrinkB=1)
    )
    if number:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        axes.text(
            x,
            y,
            number,
            ha="center",
            va="center",
            size=8.5,
            color="white",
            weight="bold",
            bbox={
                "boxstyle": "circle,pad=0.25",
                "fc": INK,
                "ec": "white",
                "lw": 0.8,
            },
        )


if __name__ == "__main__":
    main()

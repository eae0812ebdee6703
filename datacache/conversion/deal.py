"""Deal images by their labels: into splits that all have their share of each class, or into a sample.

Used by conversions and by `api.sample`. Images take their turns in the order of a hash of their path and a seed. The
numbers of labels and the summaries of tables are all that is read; memory is some hundred bytes an image. NumPy is
imported here.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain, compress

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from datacache.annotations.table.ranges import UNUSABLE, Summary
from datacache.annotations.table.table import Table


class _Labelled:
    """The images of tables that can be used, numbered one after the other, and their labels."""

    def __init__(self, tables: Sequence[Table], seed: int, rename: Mapping[str, str]) -> None:
        hashes, images, labels = array("Q"), array("q"), array("q")
        ids: dict[str, int] = {}
        for table in tables:
            for _, summary in table.summaries():
                usable = _usable(summary)
                numbers = np.cumsum([len(hashes) - 1, *usable])[1:].tolist()  # of each row, where it is usable
                for label in summary.labels:
                    id = ids.setdefault(rename.get(label, label), len(ids))
                    rows = [row for row, _ in summary.of_label(label) if usable[row]]
                    images.extend(numbers[row] for row in rows)
                    labels.extend([id] * len(rows))
                hashes.extend(xxh3_64_intdigest(_encode(path), seed) for path in compress(summary.paths(), usable))
        self.hashes = np.array(hashes, np.uint64)
        order = np.argsort(self.hashes, kind="stable")
        pairs = np.unique(np.array([images, labels], np.int64).reshape(2, -1).T, axis=0)
        self._starts = np.searchsorted(pairs[:, 0], np.arange(len(hashes) + 1))
        self._labels = pairs[:, 1]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        by_label = pairs[np.lexsort((place[pairs[:, 0]], pairs[:, 1]))]
        bounds = np.searchsorted(by_label[:, 1], np.arange(len(ids) + 1))
        names = sorted(ids, key=lambda name: (bounds[ids[name] + 1] - bounds[ids[name]], name))
        self.by_label: list[tuple[int, list[int]]] = [
            (ids[name], by_label[bounds[ids[name]] : bounds[ids[name] + 1], 0].tolist()) for name in names
        ]
        """Each label, as a number, and its images in the order of their hashes; the rarest label first."""
        self.bare: list[int] = order[np.diff(self._starts)[order] == 0].tolist()
        """Images without a label, likewise."""

    def labels_of(self, image: int) -> list[int]:
        """Return the labels of an image, as numbers."""
        found: list[int] = self._labels[self._starts[image] : self._starts[image + 1]].tolist()
        return found


class Dealt:
    """Which images go to which split."""

    def __init__(self, hashes: NDArray[np.uint64], splits: NDArray[np.uint8], seed: int) -> None:
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._splits, self._seed = hashes[order], splits[order], seed

    def of(self, path: str) -> int:
        """Return the number of an image's split."""
        key = np.uint64(xxh3_64_intdigest(_encode(path), self._seed))
        return int(self._splits[np.searchsorted(self._hashes, key)])


def stratify(tables: Sequence[Table], shares: Sequence[float], seed: int, rename: Mapping[str, str]) -> Dealt:
    """Deal all images into splits so that each has its share of each class, as well as whole images allow.

    Iterative stratification (Sechidis et al., ECML 2011): class by class, the rarest first, each image goes where most
    images of the class are missing; of several such, where most of all are missing. Images without a class come last.
    """
    images = _Labelled(tables, seed, rename)
    numbers = {label: len(its) for label, its in images.by_label}
    missing_of = [{label: share * number for label, number in numbers.items()} for share in shares]
    missing = [share * len(images.hashes) for share in shares]
    undealt = len(shares)
    splits = np.full(len(images.hashes), undealt, np.uint8)
    for label, group in (*images.by_label, (None, images.bare)):
        for image in group:
            if splits[image] != undealt:
                continue
            of_class = missing if label is None else [of[label] for of in missing_of]
            split = max(range(undealt), key=lambda split: (of_class[split], missing[split], -split))
            splits[image] = split
            missing[split] -= 1
            for its in images.labels_of(image):
                missing_of[split][its] -= 1
    return Dealt(images.hashes, splits, seed)


def sample(table: Table, n: int, seed: int, *, by_label: bool) -> list[str]:
    """Return the paths of `n` images, in order: those of the lowest hashes, or one of each label in turn, the rarest
    label first, and at last those without a label."""
    images = _Labelled([table], seed, {})
    turns = [iter(its) for _, its in images.by_label] if by_label else []
    chosen: set[int] = set()
    while turns and len(chosen) < n:
        left = []
        for turn in turns:
            image = next((image for image in turn if image not in chosen), None)
            if image is None:
                continue
            left.append(turn)
            if len(chosen) < n:
                chosen.add(image)
        turns = left
    rest = images.bare if by_label else np.argsort(images.hashes, kind="stable").tolist()
    chosen.update(rest[: n - len(chosen)])
    usable = chain.from_iterable(compress(summary.paths(), _usable(summary)) for _, summary in table.summaries())
    return [path for number, path in enumerate(usable) if number in chosen]


def _usable(summary: Summary) -> list[bool]:
    return [state != UNUSABLE for state in summary.states()]


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")

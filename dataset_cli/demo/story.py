"""The steps of `examples/mask_detection` around the training: data drawn into a bucket, shards of a split, a picture of
what was found, the model in the bucket and back.

Each is what a user would write with the public interface. Used by that example and by `dsctl demo`. One thread.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datacache import api
from datacache.core.errors import ObjectNotFoundError
from datacache.settings import Settings
from datacache.torch import ShardDataset
from dataset_cli.demo.detector import MULTIPLE, CentreNetwork, Found, right

_LONGEST_PX = 320
_READ_BYTES = 4 * 2**20
LEAST = 0.3
"""Boxes with a lower score are not counted as found."""


def draw_into(url: str, *, count: int, seed: int, settings: Settings) -> bool:
    """Draw faces with and without masks, annotated as VOC, into a folder or a bucket. False if they are there."""
    from dataset_cli.demo.faces import draw_faces

    store_url, prefix = api.split_url(url)
    with closing(api.open_store(store_url, settings)) as store, tempfile.TemporaryDirectory() as folder:
        with suppress(ObjectNotFoundError):
            store.head(f"{prefix}ImageSets/Main/val.txt")
            return False
        draw_faces(Path(folder), count=count, seed=seed)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: (path.suffix == ".txt", path)):  # the one that is looked for is last
            store.put_file(f"{prefix}{path.relative_to(folder)}", path)
    return True


def shards_of_split(
    ref: str, split: str, bucket: str, *, name: str, tags: Sequence[str] = (), settings: Settings
) -> api.SnapshotRecord | None:
    """Make shards of one split of a snapshot of the YOLO format, in `bucket`, as a snapshot of dataset `name-shards`.
    The subset they are made of is a snapshot of dataset `name`. None where no image is in the split."""
    with api.open_annotations(ref, settings=settings) as (_, table):
        query = api.Query(where=f"folder == 'images/{split}'")
        images = list(api.find_paths(table, query))
    if not images:
        return None
    named: dict[str, Any] = {"tags": tags, "move_tags": bool(tags), "settings": settings}
    part = api.subset(ref, images, name=name, parameters=query.as_json(), **named)
    # Another version of the data is another set: each has a place of its own, and one that is there is not made again.
    return api.shard(part.ref, to=f"{bucket}/shards/{name}-{part.id}", name=f"{name}-shards", **named).record


def fitting_size(ref: str, settings: Settings) -> tuple[int, int]:
    """Return height and width that a data set's images are resized to: half of what the first one has, and no more than
    what a processor can learn from in a minute."""
    header = api.read_header(ShardDataset(ref, target=None, settings=settings).read(0))
    sides = header.displayed_height, header.displayed_width
    scale = min(0.5, _LONGEST_PX / max(sides))
    high, wide = (max(4, round(side * scale / MULTIPLE)) * MULTIPLE for side in sides)
    return high, wide


def picture(ref: str, size: tuple[int, int], found: Sequence[Found], count: int, settings: Settings) -> bytes:
    """Return a PNG of the first `count` images of a shard set: the boxes found in them in colour, the true ones below,
    thin and grey. `found` is of all images, resized to `size`."""
    dataset = ShardDataset(ref, settings=settings)
    tiles = []
    shown = min(count, len(dataset))
    for number in range(shown):
        data, target = dataset[number]
        header = api.read_header(data)
        high, wide = header.displayed_height, header.displayed_width
        kept = found[number].scores >= LEAST
        scale = torch.tensor([wide / size[1], high / size[0]]).repeat(2)
        seen = Found(found[number].boxes[kept] * scale, found[number].labels[kept], found[number].scores[kept])
        path = dataset.path(number)
        boxes = _boxes(seen.boxes, seen.labels, dataset.classes)
        truth = _boxes(target["boxes"], target["labels"], dataset.classes)
        note = f"{int(right(seen, target).sum())} of them right, {len(truth)} true"
        tiles.append(
            api.Picture(
                path, data, api.Annotation(path, wide, high, boxes), api.Annotation(path, wide, high, truth), note
            )
        )
    subtitle = f"{shown} of {len(dataset):,} images the detector was not trained on"
    return api.draw_pictures(tiles, title=f"Found in {ref}", subtitle=subtitle, before="the truth")


def _boxes(boxes: Any, labels: Any, classes: Sequence[str]) -> tuple[api.Box, ...]:
    return tuple(api.Box(classes[label], *box) for box, label in zip(boxes.tolist(), labels.tolist(), strict=True))


def same(one: Sequence[Found], other: Sequence[Found]) -> bool:
    """Tell whether two looks at the same images found the same boxes, with the same scores."""
    pairs = (pair for found in zip(one, other, strict=True) for pair in zip(*found, strict=True))
    return all(torch.equal(*pair) for pair in pairs)


def put_model(url: str, network: CentreNetwork, about: dict[str, Any], settings: Settings) -> None:
    """Store a detector as one object. `about` is kept with it: plain values, at least the names of the `classes`."""
    out = io.BytesIO()
    weights = {name: value.cpu() for name, value in network.state_dict().items()}
    torch.save({"about": about, "weights": weights}, out)
    store_url, key = api.split_object_url(url)
    with closing(api.open_store(store_url, settings)) as store:
        store.put(key, out.getvalue())


def get_model(url: str, settings: Settings, device: str = "cpu") -> tuple[CentreNetwork, dict[str, Any]]:
    """Return a stored detector, and what is known about it."""
    store_url, key = api.split_object_url(url)
    with closing(api.open_store(store_url, settings)) as store:
        ref = store.head(key).ref(store_url)
        starts = range(0, ref.size_bytes, _READ_BYTES)
        data = b"".join(store.read(ref, start, min(start + _READ_BYTES, ref.size_bytes)) for start in starts)
    return _loaded(io.BytesIO(data), device)


def _loaded(file: Any, device: str) -> tuple[CentreNetwork, dict[str, Any]]:
    stored = torch.load(file, map_location=device, weights_only=True)
    network = CentreNetwork(len(stored["about"]["classes"]))
    network.load_state_dict(stored["weights"])
    return network.to(device, memory_format=torch.channels_last).eval(), stored["about"]


class Trained:
    """A detector that `put_model` has stored, for `dsctl predict --model dataset_cli.demo.story:Trained`: it says its
    `classes` and the `size` of images that it was trained on."""

    def __init__(self, weights: Path, device: str = "cpu") -> None:
        self._network, about = _loaded(weights, device)
        self._device = device
        self.classes = tuple(about["classes"])
        self.size = tuple(about["size"])

    def __call__(self, images: list[Any]) -> list[Found]:
        """Return what is found in each of these arrays of height x width x 3."""
        pixels = torch.from_numpy(np.stack(images)).to(self._device)
        return self._network.find(pixels, least=0.01)

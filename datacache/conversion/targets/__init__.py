"""Where the files of each format lie and what is in them: one `Target` a format, fed image by image.

Used by the pipeline. A target knows paths and bytes, nothing of snapshots or stores. Layouts:

    yolo         images/[SPLIT/]x.jpg  labels/[SPLIT/]x.txt  data.yaml               (Ultralytics)
                 (likewise yolo-segment, yolo-pose, yolo-obb, yolo-predictions)
    darknet      obj_train_data/[SPLIT/]x.jpg and x.txt  obj.names  obj.data  SPLIT.txt
    coco         images/[SPLIT/]x.jpg  annotations/instances[_SPLIT].json
    cvat         images/[SPLIT/]x.jpg  annotations.xml
    cvat-video   images/frame_000000.jpg  annotations.xml
    folders      [SPLIT/]CLASS/x.jpg                                                  (also called yolo-classify)
    imagefolder  SPLIT/x.jpg  SPLIT/metadata.jsonl                                   (without splits: images/…)
    keras-yolo3  images/x.jpg  SPLIT.txt  classes.txt
    label-studio images/[SPLIT/]x.jpg  annotations/tasks[_SPLIT].json
    labelme      images/[SPLIT/]x.jpg and x.json
    open-images  images/[SPLIT/]x.jpg  annotations/[SPLIT-]annotations-bbox.csv, …imagelabels.csv
                 masks/[SPLIT/]x_c0_n0000000.png, …-object-segmentation.csv          (where there are outlines)
    voc          JPEGImages/x.jpg  Annotations/x.xml  ImageSets/Main/SPLIT.txt
                 SegmentationClass/x.png  SegmentationObject/x.png  labelmap.txt    (where there are outlines)

Labels and captions of whole images, where a format cannot hold them, are in a `metadata.jsonl` beside its files.

One thread. Everything is deterministic: the same annotations in the same order give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from datacache.conversion.targets.base import About, Target
from datacache.conversion.targets.coco import Coco
from datacache.conversion.targets.cvat import Cvat, CvatVideo
from datacache.conversion.targets.folders import Folders
from datacache.conversion.targets.imagefolder import ImageFolder
from datacache.conversion.targets.keras_yolo import KerasYolo
from datacache.conversion.targets.label_studio import LabelStudio
from datacache.conversion.targets.labelme import Labelme
from datacache.conversion.targets.open_images import OpenImages
from datacache.conversion.targets.voc import Voc
from datacache.conversion.targets.yolo import Darknet, Yolo, YoloObb, YoloPose, YoloPredictions, YoloSegment

__all__ = ["TARGETS", "About", "Target"]

TARGETS: dict[str, Callable[[About], Target]] = {
    "coco": Coco,
    "cvat": Cvat,
    "cvat-video": CvatVideo,
    "darknet": Darknet,
    "folders": Folders,
    "imagefolder": ImageFolder,
    "keras-yolo3": KerasYolo,
    "label-studio": LabelStudio,
    "labelme": Labelme,
    "open-images": OpenImages,
    "voc": Voc,
    "yolo": Yolo,
    "yolo-classify": Folders,
    "yolo-obb": YoloObb,
    "yolo-pose": YoloPose,
    "yolo-predictions": YoloPredictions,
    "yolo-segment": YoloSegment,
}
"""The formats as `--to` names them."""

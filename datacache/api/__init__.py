"""The one door to datacache: what users and the edges call, and the only place where layers are put together.

`opening` opens what can be read or written, `snapshots` makes and keeps them, `travel` brings them to other catalogs,
`annotations` is about what is in the images, `marks` about what people mark on them, `models` about predictions, `node`
about the cache of this machine, `placement` about where work should run, `training` about queues of tasks and how fast
samples come, `work` about tasks of commands elsewhere. Functions take `settings`; without them they load them from the
environment. Any thread may call them. The rest are parts of lower layers that the edges need, mostly the classes of
what these functions take and return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from datacache.core.front import front

if TYPE_CHECKING:
    from datacache.annotations import model as _model
    from datacache.annotations import pairing as _pairing
    from datacache.annotations import query as _query
    from datacache.annotations import stats as _stats
    from datacache.annotations.browsing.browser import Browser as Browser
    from datacache.annotations.browsing.browser import Filter as Filter
    from datacache.annotations.browsing.browser import Matches as Matches
    from datacache.annotations.browsing.histograms import Histogram as Histogram
    from datacache.annotations.browsing.histograms import HistogramBar as HistogramBar
    from datacache.annotations.browsing.histograms import ObjectPlots as ObjectPlots
    from datacache.annotations.browsing.histograms import image_histograms as image_histograms
    from datacache.annotations.browsing.histograms import object_plots as object_plots
    from datacache.annotations.browsing.histograms import split_counts as split_counts
    from datacache.annotations.comparing import changes as _changes
    from datacache.annotations.comparing import compared as _compared
    from datacache.annotations.comparing import predictions as _predictions
    from datacache.annotations.comparing.changes import ObjectChange as ObjectChange
    from datacache.annotations.comparing.changes import compare_objects as compare_objects
    from datacache.annotations.comparing.compared import Compared as Compared
    from datacache.annotations.comparing.compared import WantedImages as WantedImages
    from datacache.annotations.comparing.matching import MatchedObject as MatchedObject
    from datacache.annotations.comparing.matching import match_objects as match_objects
    from datacache.annotations.comparing.matching import score_of as score_of
    from datacache.annotations.comparing.predictions import has_scores as has_scores
    from datacache.annotations.image_header import read_header as read_header
    from datacache.annotations.model import Annotation as Annotation
    from datacache.annotations.model import Box as Box
    from datacache.annotations.pictures import chart as _chart
    from datacache.annotations.pictures import plot as _plot
    from datacache.annotations.pictures import preview as _preview
    from datacache.annotations.pictures.draw import colours_of as colours_of
    from datacache.annotations.pictures.draw import ink_on as ink_on
    from datacache.annotations.pictures.preview import Picture as Picture
    from datacache.annotations.pictures.preview import thumbnail as thumbnail
    from datacache.annotations.pictures.svg import hex_colour as hex_colour
    from datacache.annotations.pictures.svg import svg_objects as svg_objects
    from datacache.annotations.query import Query as Query
    from datacache.annotations.query import find_paths as find_paths
    from datacache.annotations.stats import Statistics as Statistics
    from datacache.annotations.table.ranges import Row as Row
    from datacache.annotations.table.table import ImageSummary as ImageSummary
    from datacache.annotations.table.table import Table as Table
    from datacache.api.annotations import convert as convert
    from datacache.api.annotations import dedupe as dedupe
    from datacache.api.annotations import fix_problems as fix_problems
    from datacache.api.annotations import has_annotations as has_annotations
    from datacache.api.annotations import merge as merge
    from datacache.api.annotations import open_annotations as open_annotations
    from datacache.api.annotations import open_browser as open_browser
    from datacache.api.annotations import preview as preview
    from datacache.api.annotations import problems as problems
    from datacache.api.annotations import query as query
    from datacache.api.annotations import read_classes as read_classes
    from datacache.api.annotations import sample as sample
    from datacache.api.annotations import shard as shard
    from datacache.api.annotations import stats as stats
    from datacache.api.annotations import subset as subset
    from datacache.api.annotations import verify_shards as verify_shards
    from datacache.api.evaluation import evaluate as evaluate
    from datacache.api.evaluation import keep_worst as keep_worst
    from datacache.api.marks import commit_marks as commit_marks
    from datacache.api.marks import make_queue as make_queue
    from datacache.api.marks import marking_queues as marking_queues
    from datacache.api.marks import open_queue as open_queue
    from datacache.api.models import accept_predictions as accept_predictions
    from datacache.api.models import predict as predict
    from datacache.api.node import cache_status as cache_status
    from datacache.api.node import cancel_job as cancel_job
    from datacache.api.node import cluster_status as cluster_status
    from datacache.api.node import connect as connect
    from datacache.api.node import drain_node as drain_node
    from datacache.api.node import evict as evict
    from datacache.api.node import follow_drain as follow_drain
    from datacache.api.node import follow_warm_up as follow_warm_up
    from datacache.api.node import jobs as jobs
    from datacache.api.node import look_at_cluster as look_at_cluster
    from datacache.api.node import look_at_node as look_at_node
    from datacache.api.node import pin as pin
    from datacache.api.node import running_daemon as running_daemon
    from datacache.api.node import start_failure as start_failure
    from datacache.api.node import unpin as unpin
    from datacache.api.node import warm as warm
    from datacache.api.notebooks import diff as diff
    from datacache.api.opening import open_bucket as open_bucket
    from datacache.api.opening import open_catalog as open_catalog
    from datacache.api.opening import open_mounted as open_mounted
    from datacache.api.opening import open_samples as open_samples
    from datacache.api.opening import open_shards as open_shards
    from datacache.api.opening import open_snapshot as open_snapshot
    from datacache.api.opening import open_url as open_url
    from datacache.api.options import ConvertOptions as ConvertOptions
    from datacache.api.options import NamingOptions as NamingOptions
    from datacache.api.options import QueryOptions as QueryOptions
    from datacache.api.options import ReadingOptions as ReadingOptions
    from datacache.api.options import ShardOptions as ShardOptions
    from datacache.api.options import check_options as check_options
    from datacache.api.options import make_query as make_query
    from datacache.api.options import take as take
    from datacache.api.placement import preferred_nodes as preferred_nodes
    from datacache.api.quotas import QuotaUse as QuotaUse
    from datacache.api.quotas import namespace_quotas as namespace_quotas
    from datacache.api.quotas import set_namespace_quota as set_namespace_quota
    from datacache.api.snapshots import collect_garbage as collect_garbage
    from datacache.api.snapshots import create_snapshot as create_snapshot
    from datacache.api.snapshots import dataset_access as dataset_access
    from datacache.api.snapshots import diff_snapshots as diff_snapshots
    from datacache.api.snapshots import export_snapshot as export_snapshot
    from datacache.api.snapshots import import_export as import_export
    from datacache.api.snapshots import import_frames as import_frames
    from datacache.api.snapshots import import_jsonl as import_jsonl
    from datacache.api.snapshots import is_empty as is_empty
    from datacache.api.snapshots import list_datasets as list_datasets
    from datacache.api.snapshots import list_snapshots as list_snapshots
    from datacache.api.snapshots import remove_snapshot as remove_snapshot
    from datacache.api.snapshots import set_dataset_access as set_dataset_access
    from datacache.api.snapshots import tag_snapshot as tag_snapshot
    from datacache.api.snapshots import unchecked_objects as unchecked_objects
    from datacache.api.snapshots import untag_snapshot as untag_snapshot
    from datacache.api.snapshots import verify_snapshot as verify_snapshot
    from datacache.api.snapshots import versions_of_file as versions_of_file
    from datacache.api.training import create_tasks as create_tasks
    from datacache.api.training import list_tasks as list_tasks
    from datacache.api.training import measure_loading as measure_loading
    from datacache.api.training import open_tasks as open_tasks
    from datacache.api.training import worker_counts as worker_counts
    from datacache.api.travel import lock_snapshot as lock_snapshot
    from datacache.api.travel import pull_snapshot as pull_snapshot
    from datacache.api.travel import push_snapshot as push_snapshot
    from datacache.api.versions import Descendants as Descendants
    from datacache.api.versions import VersionCounts as VersionCounts
    from datacache.api.versions import descendants as descendants
    from datacache.api.versions import version_counts as version_counts
    from datacache.api.weights import split_weights as split_weights
    from datacache.api.work import work_on_queue as work_on_queue
    from datacache.catalog import refs as _refs
    from datacache.catalog.access import Access as Access
    from datacache.catalog.access import access_of as access_of
    from datacache.catalog.assigned import assign as assign
    from datacache.catalog.assigned import assigned_to as assigned_to
    from datacache.catalog.base import Catalog as Catalog
    from datacache.catalog.gc import GarbageReport as GarbageReport
    from datacache.catalog.lock import Lock as Lock
    from datacache.catalog.lock import find_lock as find_lock
    from datacache.catalog.record import held_in_words as held_in_words
    from datacache.catalog.record import held_of as held_of
    from datacache.catalog.refs import Removal as Removal
    from datacache.catalog.refs import check_name as check_name
    from datacache.catalog.refs import check_tag as check_tag
    from datacache.catalog.refs import parse_ref as parse_ref
    from datacache.catalog.refs import plan_removal as plan_removal
    from datacache.catalog.refs import resolve as resolve
    from datacache.catalog.tasks.base import TaskState as TaskState
    from datacache.catalog.travel import SnapshotCopy as SnapshotCopy
    from datacache.conversion.pipeline import Conversion as Conversion
    from datacache.daemon import running as _running
    from datacache.daemon.client import DaemonClient as DaemonClient
    from datacache.imports.archives.members import UnpackLimits as UnpackLimits
    from datacache.imports.failures import Failure as Failure
    from datacache.imports.jsonl import JsonlProgress as JsonlProgress
    from datacache.imports.videos.frames import FailedVideo as FailedVideo
    from datacache.imports.videos.frames import FramesProgress as FramesProgress
    from datacache.imports.videos.frames import ImportedFrames as ImportedFrames
    from datacache.loaders import processes as _processes
    from datacache.loaders.decode import height_and_width as height_and_width
    from datacache.loaders.tasks.images import MarkingQueue as MarkingQueue
    from datacache.loaders.tasks.images import QueuedImage as QueuedImage
    from datacache.loaders.tasks.images import QueueProgress as QueueProgress
    from datacache.loaders.tasks.plan import Wait as Wait
    from datacache.loaders.tasks.queue import TaskQueue as TaskQueue
    from datacache.loaders.tasks.queue import TaskStatus as TaskStatus
    from datacache.loaders.tuning import autotune as _autotune
    from datacache.loaders.tuning.report import Report as Report
    from datacache.manifest import diff as _diff
    from datacache.manifest.diff import Change as Change
    from datacache.manifest.model import DatasetRecord as DatasetRecord
    from datacache.manifest.model import Entry as Entry
    from datacache.manifest.model import Held as Held
    from datacache.manifest.model import SnapshotRecord as SnapshotRecord
    from datacache.marking.commit import Committed as Committed
    from datacache.marking.commit import Left as Left
    from datacache.marking.drafts import Draft as Draft
    from datacache.marking.drafts import DraftCount as DraftCount
    from datacache.marking.drafts import MarkedObject as MarkedObject
    from datacache.marking.drafts import all_drafts as all_drafts
    from datacache.marking.drafts import count_drafts as count_drafts
    from datacache.marking.drafts import discard_draft as discard_draft
    from datacache.marking.drafts import draft as draft
    from datacache.marking.drafts import drafts as drafts
    from datacache.marking.drafts import is_stale as is_stale
    from datacache.marking.drafts import marked as marked
    from datacache.marking.drafts import save_draft as save_draft
    from datacache.models import evaluation_plot as _evaluation_plot
    from datacache.models.evaluate import Evaluation as Evaluation
    from datacache.models.predicting.predict import Predicted as Predicted
    from datacache.models.predicting.snapshots import Accepted as Accepted
    from datacache.reader.export.export import Exported as Exported
    from datacache.reader.snapshot import Snapshot as Snapshot
    from datacache.reader.snapshot import Stat as Stat
    from datacache.shards.build import Sharded as Sharded
    from datacache.shards.verify import ShardProblem as ShardProblem
    from datacache.store.local.walk import Links as Links
    from datacache.store.open import open_store as open_store
    from datacache.store.urls import split_object_url as split_object_url
    from datacache.store.urls import split_url as split_url
    from datacache.tiers.memory import abandoned_dirs as abandoned_dirs
    from datacache.tiers.memory import memory_dir as memory_dir

    AnnotationProblem = _model.Problem
    best_report = _autotune.best
    carry_out = _refs.remove
    collect_statistics = _stats.collect
    compare_annotations = _changes.compare
    compare_snapshots = _refs.compare
    count_images = _query.count
    diff_manifests = _diff.diff
    draw_pictures = _preview.preview
    find_differences = _compared.find_differences
    find_images = _query.find
    forget_volume = _refs.forget_volume
    match_predictions = _predictions.match_tables
    prediction_quality = _predictions.quality
    is_image_path = _pairing.is_image
    PLOT_FORMATS = _chart.FORMATS
    plot_evaluation = _evaluation_plot.plot
    plot_statistics = _plot.plot
    processor_count = _processes.processors
    run_daemon = _running.run

__getattr__, __all__ = front(__name__)

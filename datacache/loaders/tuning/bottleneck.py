"""Which part of the loading holds a training up, in words: a pure function from what was measured.

Used by the loader and whatever measures one. Any thread.
"""

from __future__ import annotations

from collections.abc import Callable

from datacache.loaders.tuning.report import Bottleneck, Report, Stretch, share

_READY = 0.1
"""Below this share of waiting, no loader makes a training noticeably faster."""
_FULL = 0.85
"""From this share on, the processors are called fully used: what runs beside is not seen here."""
_SOME = 0.2


def diagnose(stretch: Stretch) -> Report:
    """What holds this training up, in words."""
    if not stretch.steps or not stretch.step_s:
        return Report(stretch, "unknown", "No whole step was measured yet.")
    part = share(stretch.data_s, stretch.step_s)
    if part < _READY:
        ready = f"The training itself is what takes time: data is ready {_percent(1 - part)} of the time."
        return Report(stretch, "training", ready)
    scores = _scores(stretch)
    bottleneck = max(scores, key=lambda name: scores[name])
    return Report(stretch, bottleneck, _WORDS[bottleneck](stretch))


def _scores(stretch: Stretch) -> dict[Bottleneck, float]:
    """For each suspect, the share of the loading processes' time that it took."""
    usage = stretch.usage
    at_work = usage.fetch_s + usage.collate_s
    lanes_s = stretch.workers * stretch.step_s if stretch.workers else max(stretch.data_s, at_work)
    said_s = usage.read_s + usage.miss_s + usage.decode_s + usage.transform_s
    # What a dataset without a clock did: on a processor or queued for one it computed, else it waited for something.
    unsaid_s = max(0.0, usage.fetch_s - said_s)
    waited_s = max(0.0, usage.fetch_s - usage.fetch_cpu_s - usage.fetch_queued_s - usage.miss_s)
    waited_s = min(unsaid_s, waited_s)
    seconds: dict[Bottleneck, float] = {
        "store": usage.miss_s + waited_s,
        "reading": usage.read_s,
        "decoding": usage.decode_s,
        "transform": usage.transform_s,
        "collate": usage.collate_s,
    }
    # Around a dataset that has a clock it is the user's own code; one that has none most likely decodes.
    seconds["transform" if said_s else "decoding"] += unsaid_s - waited_s
    scores = {name: share(value, lanes_s) for name, value in seconds.items()}
    if stretch.workers:
        # Batches are written by a thread of the worker and read by this one; idle workers alone prove nothing, as one
        # that is late makes the others wait.
        writing_s = max(0.0, usage.cpu_s - usage.fetch_cpu_s - usage.collate_s)
        scores["handing"] = max(share(stretch.receive_cpu_s, stretch.data_s), share(writing_s, lanes_s))
    else:
        scores["other"] = share(max(0.0, stretch.data_s - at_work), lanes_s)
    return scores


def _store(stretch: Stretch) -> str:
    usage = stretch.usage
    if not usage.misses:
        return (
            f"Reading waits: {_percent(share(usage.fetch_s - usage.fetch_cpu_s, usage.fetch_s))} of the dataset's time"
            " goes into neither computing nor reading from the cache (a store or disk behind it, a lock)."
            f" {_more_workers(stretch, 'they wait at the same time')}"
        )
    part = share(usage.misses, usage.samples)
    rate = usage.size_bytes * part / stretch.step_s / 1e6
    return (
        f"The store: {_percent(part)} of the samples were not in the cache and came at {rate:,.0f} MB/s. Warm the"
        " cache (dsctl warm), or let lookahead fetch what comes next; more workers do not help."
    )


def _reading(stretch: Stretch) -> str:
    rate = stretch.usage.size_bytes / max(stretch.usage.read_s, 1e-9) / 1e6
    return (
        f"Reading what is cached, at {rate:,.0f} MB/s in each process. Packed batches (packed=True) and shards (dsctl"
        " shard) cost less for each sample, and RAM (DATACACHE_RAM_BYTES) is faster than a slow disk."
    )


def _decoding(stretch: Stretch) -> str:
    return (
        f"Decoding: {_computing(stretch)} Smaller images cost less: dsctl convert --resize makes them once and for all."
    )


def _transform(stretch: Stretch) -> str:
    return f"The transform: {_computing(stretch)} Cheaper operations, or the same on the device, help too."


def _computing(stretch: Stretch) -> str:
    usage, workers, processors = stretch.usage, stretch.workers, stretch.processors
    used = share(stretch.cpu_s, stretch.step_s * processors)
    if workers:
        busy = _percent(min(1.0, share(usage.fetch_s + usage.collate_s, workers * stretch.step_s)))
        who = f"{workers} workers are" if workers > 1 else "1 worker is"
        head = f"{who} busy {busy} of the time"
    else:
        head = "the training's own process does it, as there are no workers"
    queued = share(usage.fetch_queued_s, usage.fetch_s)
    count = f"{processors} processors" if processors > 1 else "1 processor"
    if queued >= _SOME:
        return (
            f"{head}, and {_percent(queued)} of that it waits for a processor: {count} are too few for all that runs."
        )
    if used >= _FULL:
        return f"{head}, and all of {count} is in use: more of them would help."
    if not workers:
        return f"{head}; with num_workers=1 or more it is done beside the training."
    if workers < processors:
        return f"{head}, and {_percent(used)} of {count} is in use: num_workers can be larger."
    return f"{head}; there are {count}."


def _collate(stretch: Stretch) -> str:
    part = share(stretch.usage.collate_s, stretch.usage.fetch_s + stretch.usage.collate_s)
    return (
        f"Making batches: {_percent(part)} of the loading time goes into collate. packed=True or a cheaper collate_fn"
        " helps; so do images of one, smaller size."
    )


def _handing(stretch: Stretch) -> str:
    usage = stretch.usage
    busy = _percent(min(1.0, share(usage.fetch_s + usage.collate_s, stretch.workers * stretch.step_s)))
    return (
        f"Handing batches between processes: workers read and decode only {busy} of the time, the rest is the batches'"
        " way to the training. Try num_workers=0, packed=True, or tensors instead of many Python objects."
    )


def _other(stretch: Stretch) -> str:
    usage = stretch.usage
    part = max(0.0, 1 - share(usage.fetch_s + usage.collate_s, stretch.data_s))
    return (
        f"The loader itself: {_percent(part)} of the waiting is neither reading nor making batches (copying to the"
        " device, the order of samples). Larger batches make it less."
    )


def _more_workers(stretch: Stretch, why: str) -> str:
    more = max(2 * stretch.workers, 2)
    return f"More workers help ({why}): try num_workers={more}."


_WORDS: dict[Bottleneck, Callable[[Stretch], str]] = {
    "store": _store,
    "reading": _reading,
    "decoding": _decoding,
    "transform": _transform,
    "collate": _collate,
    "handing": _handing,
    "other": _other,
}


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"

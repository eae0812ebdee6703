"""The ways to read a training set that are compared with one another, each set up as its documentation says it is fast.

Each is a module with the same functions; what it imports is in the virtual environment of its library, so the parent
process imports none of them but starts `python -m benchmarks.loader_peers` there (`benchmarks/contenders.py`):

    write(images: Path, target: Path)                 the images as the library's own files, where it has any
    open_loader(source: str, plan: ReadPlan) -> Loader    called with an epoch's number, gives that epoch's batches

A batch of raw bytes is a list of `bytes` or has `data` and `offsets` (`datacache.loaders.packed`); one of decoded
images is a tensor or a list of them. Nothing else is made of the bytes: what is measured is reading, and handing over.
"""

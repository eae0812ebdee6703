"""The engine `queue`: tasks in the catalog, done by processes of `dsctl tasks work`.

`client` sends them, `worker` does them; `records` has what both write into the catalog beside the task queue, and
`trusted` what they unpickle. `executors/CONCURRENCY.md` says who may be killed when.
"""

"""From a bucket to a measured model, as a pipeline of Kubeflow. Each step is a component beside this file, whose
result, the reference of a snapshot, is an input of the next. Needs `pip install kfp kfp-kubernetes`:

    python pipeline.py --name mask pipeline.yaml      # to upload; asks for `url` and `bucket` when it is run

The catalog and the stores' credentials are in the Secret `datacache-client`, under the names of environment variables.
A pod starts only where it has all of NAMES: take out what yours has not, as AWS_ENDPOINT_URL on Amazon.
"""

import argparse
from pathlib import Path

from kfp import compiler, components, dsl, kubernetes

STEPS = ("snapshot", "convert", "select", "shard", "warm", "train", "predict", "evaluate")
SECRET = "datacache-client"
NAMES = ("DATACACHE_CATALOG", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


def pipeline(name: str):
    """Return the pipeline of a data set. Its name is fixed, as annotations of volumes are."""
    step = {each: components.load_component_from_file(str(Path(__file__).with_name(f"{each}.yaml"))) for each in STEPS}

    def with_stores(task):
        kubernetes.use_secret_as_env(task, SECRET, {each: each for each in NAMES})
        kubernetes.add_pod_label(task, "app.kubernetes.io/name", "datacache")  # whom MongoDB's NetworkPolicy lets in
        return task.set_caching_options(False)  # a bucket changes; where nothing did, dsctl has no work

    def with_data(task):
        return kubernetes.add_ephemeral_volume(
            task,
            volume_name="data",
            mount_path="/data",
            access_modes=["ReadOnlyMany"],
            size="1Gi",
            storage_class_name="datacache-dataset",
            annotations={"datacache.io/dataset": f"{name}-shards@latest", "datacache.io/warm": "wait"},
        )

    @dsl.pipeline(name=f"datacache-{name}", description="snapshot, convert, shard, warm, train, predict, evaluate")
    def loop(url: str, bucket: str, epochs: str = "10") -> str:
        source = with_stores(step["snapshot"](name=name, url=url))
        labels = with_stores(step["convert"](name=f"{name}-yolo", snapshot=source.outputs["ref"]))
        training = with_stores(step["select"](name=f"{name}-train", labels=labels.outputs["ref"]))
        place = f"{bucket}/shards/{training.outputs['ref']}"
        shards = with_stores(step["shard"](name=f"{name}-shards", training=training.outputs["ref"], url=place))
        warm = with_data(step["warm"]()).after(shards).set_caching_options(False)
        model = f"{bucket}/models/{dsl.PIPELINE_JOB_NAME_PLACEHOLDER}.pt"
        trained = with_data(with_stores(step["train"](model=model, epochs=epochs))).after(warm)
        found = step["predict"](name=f"{name}-predicted", labels=labels.outputs["ref"], model=trained.outputs["url"])
        measured = step["evaluate"](predictions=with_stores(found).outputs["ref"], labels=labels.outputs["ref"])
        return with_stores(measured).outputs["report"]

    return loop


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the pipeline of a data set.")
    parser.add_argument("--name", required=True, help="of the data set")
    parser.add_argument("out", help="the compiled pipeline, such as pipeline.yaml")
    options = parser.parse_args()
    compiler.Compiler().compile(pipeline(options.name), options.out)

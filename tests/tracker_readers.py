"""What trackers hold, read through each library's own API or files: `READERS[name](folder)` returns (step, value) pairs of a
metric, in the order of the file or the database."""

import json
import os
import subprocess
import sys
import warnings

Points = list[tuple[int, float]]


def tensorboard(run, metric) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars(metric)]


def wandb_records(run):
    """Records of all offline files; the reader is SwanLab's, the messages are wandb's."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(str(file))
            while (data := reader.scan()) is not None:
                record = Record()
                record.ParseFromString(bytes(data))
                yield record


def wandb(run, metric) -> Points:
    axis = "sft/step" if metric.startswith("sft/") else "step"
    found = []
    for record in wandb_records(run):
        row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if metric in row:
            found.append((row[axis], row[metric]))
    return found


def mlflow_client(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its tables are declared with what sqlalchemy deprecates
        import mlflow

        return mlflow.MlflowClient(tracking_uri=f"sqlite:///{run.resolve() / 'mlflow' / 'mlflow.db'}")


def mlflow(run, metric) -> Points:
    client = mlflow_client(run)
    identity = json.loads((run / "mlflow" / "run.json").read_bytes())["id"]
    return [(each.step, each.value) for each in client.get_metric_history(identity, metric)]


TRACKIO = """
import json, sys
import trackio
from trackio.sqlite_storage import SQLiteStorage
runs = [run for run in trackio.Api().runs("antiphon") if run.id and run.name.endswith(sys.argv[1])]
rows = [row for run in runs for row in SQLiteStorage.get_logs("antiphon", run.name, run_id=run.id)]
rows = [dict(row, timestamp=None) for row in rows]
print(json.dumps({"runs": len(runs), "config": runs[0].config, "rows": rows}))
"""


def trackio_run(run):
    """All of a run; the library reads its folder from the environment when it is imported."""
    identity = json.loads((run / "trackio" / "run.json").read_bytes())["id"]
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, identity[:6]], capture_output=True, text=True, env=trackio_environment(run)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def trackio_environment(run):
    return {**os.environ, "TRACKIO_DIR": str(run.parent / "trackio_data")}


def trackio(run, metric) -> Points:
    return [(row["step"], row[metric]) for row in trackio_run(run)["rows"] if metric in row]


def swanlab_records(run):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for file in sorted((run / "swanlab").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(str(file))
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            yield record
        reader.close()


def swanlab(run, metric) -> Points:
    found = [each.scalar for each in swanlab_records(run) if each.HasField("scalar")]
    return [(scalar.step, scalar.value.number) for scalar in found if scalar.key == metric]


READERS = {each.__name__: each for each in (tensorboard, wandb, mlflow, trackio, swanlab)}

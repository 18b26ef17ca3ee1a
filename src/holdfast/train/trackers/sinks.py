"""One class per tracker. A sink gets the record of each iteration once, in order, as metrics.jsonl has it."""

import os
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.config import Config

Record = dict[str, Any]


class Sink(ABC):
    """A tracker's run. `run_id` is None at the first start and what `run_id` was at the end of the last start afterwards."""

    name: str
    buffers = False
    """Whether what was sent is stored only by `close`."""

    @abstractmethod
    def open(self, run: Path, config: Config, run_id: str | None) -> str:
        """Opens the tracker's run, a new one or the one with this id, and returns its id."""

    def last_iteration(self) -> int:
        """The newest iteration that the tracker is known to hold; 0 if it cannot say."""
        return 0

    @abstractmethod
    def send(self, record: Record) -> None: ...

    @abstractmethod
    def close(self, finished: bool) -> None:
        """Returns when everything sent has arrived. `finished`: the run has reached its last iteration."""


def numbers(record: Record) -> dict[str, float]:
    return {key: float(value) for key, value in record.items() if isinstance(value, int | float) and key != "iteration"}


def settings(config: Config) -> dict[str, Any]:
    """The configuration as flat keys, without those that are unset."""
    return {key: value for table in asdict(config).values() for key, value in table.items() if value is not None}


class WandbSink(Sink):
    """Weights & Biases. WANDB_MODE=offline writes below the run folder; `wandb sync` sends it later."""

    name = "wandb"
    buffers = True

    def open(self, run: Path, config: Config, run_id: str | None) -> str:
        import wandb

        log = config.log
        self._run = wandb.init(
            project=log.wandb_project,
            entity=log.wandb_entity,
            name=log.wandb_exp_name or run.name,
            id=run_id,
            resume="allow",
            dir=str(run),
            config=settings(config),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        identifier: str = self._run.id
        return identifier

    def last_iteration(self) -> int:
        return int(self._run.step) - 1 if self._run.resumed else 0  # `step` is the one after the last

    def send(self, record: Record) -> None:
        self._run.log(numbers(record), step=record["iteration"])

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


class MlflowSink(Sink):
    """MLflow, at MLFLOW_TRACKING_URI or --mlflow-tracking-uri."""

    name = "mlflow"

    def open(self, run: Path, config: Config, run_id: str | None) -> str:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(tracking_uri=config.log.mlflow_tracking_uri), Metric
        if run_id is None:
            name = config.log.mlflow_experiment
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else self._client.create_experiment(name)
            run_id = str(self._client.create_run(number, run_name=run.name).info.run_id)
            params = [Param(key, str(value)[:500]) for key, value in settings(config).items()]
            for start in range(0, len(params), 100):  # the most that one call takes
                self._client.log_batch(run_id, params=params[start : start + 100])
        self._id = run_id
        self._client.set_terminated(run_id, "RUNNING")
        return run_id

    def last_iteration(self) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._id, "loss")), default=0)

    def send(self, record: Record) -> None:
        when = int(record.get("time", 0) * 1000)
        metrics = [self._metric(key, value, when, record["iteration"]) for key, value in numbers(record).items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class TrackioSink(Sink):
    """trackio, in TRACKIO_DIR or in its own folder."""

    name = "trackio"
    buffers = True

    def open(self, run: Path, config: Config, run_id: str | None) -> str:
        import trackio

        identifier = run_id or run.name
        self._run = trackio.init(
            project=config.log.trackio_project,
            name=identifier,
            resume="allow",
            config={key: str(value) for key, value in settings(config).items()},
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return identifier

    def last_iteration(self) -> int:
        return int(getattr(self._run, "_next_step", 1)) - 1  # trackio has no public name for it

    def send(self, record: Record) -> None:
        self._run.log(numbers(record), step=record["iteration"])

    def close(self, finished: bool) -> None:
        self._run.finish()


def sinks_of(config: Config) -> list[Sink]:
    """The trackers that the configuration asks for."""
    from holdfast.train.trackers.prometheus import PrometheusSink

    os.environ.setdefault("WANDB_SILENT", "true")
    log, found = config.log, list[Sink]()
    if log.wandb_project:
        found.append(WandbSink())
    if log.mlflow_experiment:
        found.append(MlflowSink())
    if log.trackio_project:
        found.append(TrackioSink())
    if log.metrics_port is not None:
        found.append(PrometheusSink())
    return found

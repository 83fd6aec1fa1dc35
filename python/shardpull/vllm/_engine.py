"""What runs in vLLM's workers: a shardpull worker that lands syncs beside the model, and the update that brings them into it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from .. import __version__
from .._errors import CancelledError, Error, FailedPreconditionError, InvalidArgumentError, UnavailableError, UnimplementedError
from .._fleet import Worker
from .._native import WorkerReport
from ..modules import ModuleModel
from ._layers import LayerwiseUpdate
from ._protocol import GIVEN_UP, READY


@dataclass
class ShardpullInitInfo(WeightTransferInitInfo):
    """What a worker is told, by shardpull.vllm.Trainer: options of shardpull.Worker that are not None, and who it is."""

    package_version: str
    num_consumers: int
    """Workers of all engines together."""
    num_replicas: int = 1
    """Engines, of as many workers each."""
    replica_rank: int = 0
    """Which of the engines this is."""
    directory: str | None = None
    token: int | None = None
    """None: that of the worker's own environment, SHARDPULL_TOKEN."""
    rendezvous: str | None = None
    insecure_listen: bool | None = None
    transport: str | None = None
    interfaces: str | None = None
    ucx_workers: int | None = None
    connect_timeout_ms: int | None = None
    stall_timeout_ms: int | None = None
    heartbeat_ms: int | None = None
    dead_after_ms: int | None = None
    settings: str | None = None
    ring_depth: int | None = None
    max_chunk_bytes: int | None = None
    chunk_split: int | None = None
    pull_split: int | None = None
    path: str | None = None
    conversions: str | None = None
    apply: str | None = None
    """"inplace": modules take their new weights while others still come. "staged": all do once every worker has all of them,
    so that a sync that fails leaves the model as it was."""
    trace_file: str | None = None
    """"{consumer}" in it becomes the worker's number."""

    def options(self, consumer: int) -> dict[str, Any]:
        own = {"package_version", "num_consumers", "num_replicas", "replica_rank", "apply"}
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in own}
        if self.trace_file is not None:
            given["trace_file"] = self.trace_file.replace("{consumer}", str(consumer))
        return {name: value for name, value in given.items() if value is not None}


@dataclass
class ShardpullUpdateInfo(WeightTransferUpdateInfo):
    version: int
    ticket: int
    """Of this try: what the sender is told that the worker is ready for."""


class _Ended(Exception):
    """One sync has ended, and with it serve()."""


class ShardpullEngine(WeightTransferEngine[ShardpullInitInfo, ShardpullUpdateInfo]):
    """vLLM's view of it: init once, then start, update and finish for each sync.

    Nothing of the model changes before new weights have landed, and between two calls it can always run. An update that
    fails may leave some modules new and some old, unless it was staged; the next one brings all.
    """

    init_info_cls = ShardpullInitInfo
    update_info_cls = ShardpullUpdateInfo
    supports_draft_weight_update = False
    defers_processing = True

    def __init__(self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker: Worker | None = None
        self._update: LayerwiseUpdate | None = None
        self._memory: dict[str, dict[str, torch.Tensor]] = {}
        """Where syncs land, by module path and name there."""
        self._staged = False
        self._landed: list[str] = []
        """Modules of a staged sync, in the order in which they were complete."""
        self._state = "idle"

    # ---- What vLLM calls

    def init_transfer_engine(self, init_info: ShardpullInitInfo) -> None:
        """Joins the fleet; again after that, anew. Waits for the trainers, connect_timeout_ms at most."""
        self.shutdown()
        if init_info.package_version != __version__:
            raise FailedPreconditionError(f"the trainer has shardpull {init_info.package_version}, this worker {__version__}: they must be the same")
        if init_info.apply not in (None, "inplace", "staged"):
            raise InvalidArgumentError(f"apply must be 'inplace' or 'staged', not {init_info.apply!r}")
        parallel = self.vllm_config.parallel_config
        if parallel.enable_eplb:
            raise UnimplementedError("enable_eplb: experts that move between slots at run time would get the weights of others")
        consumer = self._consumer(init_info)
        update = LayerwiseUpdate(self.model, self.vllm_config, self.device)
        paths = {module: path for path, module in self.model.named_modules()}
        homes = dict.fromkeys(paths[one.module] for one in update.loadables.values())
        model = ModuleModel(
            self.model,
            self._load_weights,
            post_process={path: functools.partial(self._module_landed, path) for path in homes},
            optional=update.optional,
            checkpoint_format=update.checkpoint_format,
        )
        parameters = model.parameters()
        buffers = dict(self.model.named_buffers())
        for name in parameters:
            if name not in update.loadables and name in buffers:
                parameters[name].bind(buffers[name])  # buffers that a checkpoint feeds have no other form
        self._staged = init_info.apply == "staged"
        self._update = update
        try:
            self._worker = Worker(model, consumer=consumer, **init_info.options(consumer))
        except BaseException:
            self._update = None
            raise
        for name, one in update.loadables.items():
            self._memory.setdefault(paths[one.module], {})[one.tensor] = from_dlpack(model.parameters()[name])

    def start_weight_update(self) -> None:
        if self._worker is None:
            raise FailedPreconditionError("start_weight_update before init_weight_transfer_engine")
        if self._state != "idle":
            raise FailedPreconditionError("start_weight_update a second time before finish_weight_update")
        self._state = "started"

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own waits for an accelerator afterwards, which a build for CPUs has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShardpullUpdateInfo) -> None:
        """One sync, as the sender runs it; raises what failed it."""
        if self._worker is None or self._update is None:
            raise FailedPreconditionError("update_weights before init_weight_transfer_engine")
        if update_info.ticket == GIVEN_UP:
            self._state = "idle"
            raise CancelledError("the trainer has given the update up")
        if self._state != "started":
            raise FailedPreconditionError("update_weights before start_weight_update, or a second time after it")
        self._state = "idle"  # what fails here has ended the update
        self._landed.clear()
        self._update.begin()
        try:
            version = self._serve_one(self._worker, update_info)
            if version != update_info.version:
                raise FailedPreconditionError(f"the sync brought version {version}, the update was to bring {update_info.version}")
            for path in self._landed:
                self._process(path)
            self._update.finish()
        except BaseException:
            self._update.abort()
            raise
        self._state = "updated"

    def finish_weight_update(self) -> None:
        if self._state != "updated":
            raise FailedPreconditionError("finish_weight_update without an update that succeeded")
        self._state = "idle"

    def set_weight_update_target(self, model: torch.nn.Module, model_config: Any) -> None:
        if model is not self._default_model:
            raise UnimplementedError("updates of a draft model are not supported")
        super().set_weight_update_target(model, model_config)

    def shutdown(self) -> None:
        """Leaves the fleet; the model keeps what it has."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
        if self._update is not None:
            self._update.abort()
        self._update = None
        self._memory.clear()
        self._landed.clear()
        self._state = "idle"

    # ---- Parts

    def _consumer(self, info: ShardpullInitInfo) -> int:
        """This worker's number among those of all engines."""
        parallel = self.vllm_config.parallel_config
        own: int = parallel.data_parallel_index * parallel.world_size + parallel.rank
        world = info.num_consumers // max(1, info.num_replicas)
        # A dense model's data-parallel replicas do not know how many they are; the trainer has asked the engine.
        if info.num_replicas < 1 or info.num_consumers % info.num_replicas or world % parallel.world_size or own >= world:
            raise FailedPreconditionError(
                f"num_consumers is {info.num_consumers} for {info.num_replicas} engines of as many workers each; "
                f"this is worker {own} of one with {parallel.world_size} in a data-parallel replica"
            )
        if not 0 <= info.replica_rank < info.num_replicas:
            raise InvalidArgumentError(f"replica_rank is {info.replica_rank}, of {info.num_replicas} engines")
        return info.replica_rank * world + own

    def _load_weights(self, weights: Any) -> Any:
        last = "none"

        def given() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal last
            for name, tensor in weights:
                last = f"{name} {list(tensor.shape)}"
                yield name, tensor

        with set_current_vllm_config(self.vllm_config):
            try:
                return self.model.load_weights(given())
            except Error:
                raise
            except Exception as error:  # some have no text, and none names the tensor
                raise InvalidArgumentError(
                    f"{type(self.model).__name__}'s loaders failed; the last tensor that they took of the trainer's was {last}: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def _serve_one(self, worker: Worker, info: ShardpullUpdateInfo) -> int:
        outcome: list[tuple[int, Error | None]] = []

        def ended(version: int, error: Error | None, report: WorkerReport) -> None:
            outcome.append((version, error))
            raise _Ended

        worker.send_message("trainer 0", READY, str(info.ticket))
        try:
            worker.serve(ended)
        except _Ended:
            pass
        if not outcome:
            raise UnavailableError("the fleet has ended before the sync began", fault="peer", peer="trainer 0")
        version, error = outcome[0]
        if error is not None:
            raise error
        return version

    def _module_landed(self, path: str) -> None:
        if self._staged:
            self._landed.append(path)
        else:
            self._process(path)

    def _process(self, path: str) -> None:
        assert self._update is not None
        self._update.process(self.model.get_submodule(path), self._memory[path])

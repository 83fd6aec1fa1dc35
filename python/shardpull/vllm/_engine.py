"""What runs in vLLM's workers: a shardpull worker that lands syncs beside the model, and the update that brings them into it."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from .. import __version__
from .._errors import Error, FailedPreconditionError, InvalidArgumentError, UnavailableError, UnimplementedError
from .._fleet import Worker
from .._native import WorkerReport
from ..modules import ModuleModel
from ._layers import LayerwiseUpdate
from ._protocol import JOINED, READY, UPDATED

log = logging.getLogger(__name__)

MAX_TEXT = 16384
"""Characters of an error's text that travel."""


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
    ticket: int = 0
    """Of this try: what the sender is told that the worker has joined for."""
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
        own = {"package_version", "num_consumers", "num_replicas", "replica_rank", "ticket", "apply"}
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
    fails may leave some modules new and some old, unless it was staged; the next one brings all. Only calls that do not fit
    raise.
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
        self._lands_in_model = False
        """Some of a sync lands in the model itself."""
        self._landed: list[str] = []
        """Modules of a staged sync, in the order in which they were complete."""
        self._state = "idle"
        self._changed = False
        """The update under way has brought something into the model."""
        self._mixed = False
        """The model has parts of an update that failed."""

    # ---- What vLLM calls

    def init_transfer_engine(self, init_info: ShardpullInitInfo) -> None:
        """Joins the fleet; again after that, anew. Waits for the trainers, connect_timeout_ms at most.

        Where one of several workers fails, none has joined, and the last one alone raises.
        """
        if self._state != "idle":  # an update that its trainer did not live to end, and vLLM has no call that drops it
            caller: Any = sys._getframe(1).f_locals.get("self")
            if getattr(caller, "weight_transfer_engine", None) is self:
                caller._weight_update_active = False
        failed: Exception | None = None
        try:
            self._join(init_info)
        except Exception as error:  # noqa: BLE001  (raised by one of all)
            failed = error
        failed = self._failed_anywhere(failed)
        if failed is not None:
            self.shutdown()
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise failed
        elif self._worker is not None:
            with suppress(Error):
                self._worker.send_message("trainer 0", JOINED, f"{init_info.ticket} {'mixed' if self._mixed else 'whole'}")

    def start_weight_update(self) -> None:
        if self._worker is None:
            raise FailedPreconditionError("start_weight_update before init_weight_transfer_engine")
        self._state = "started"

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """vLLM's own waits for an accelerator afterwards, which a build for CPUs has not."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ShardpullUpdateInfo) -> None:
        """One sync, as the sender runs it. How it went is told to the trainer (UPDATED), and never raised."""
        worker = self._worker
        if worker is None or self._update is None:
            raise FailedPreconditionError("update_weights before init_weight_transfer_engine")
        if self._state != "started":
            raise FailedPreconditionError("update_weights before start_weight_update, or a second time after it")
        self._state = "updated"
        self._changed = False
        text: str | None = None
        try:
            self._receive(worker, self._update, update_info)
            self._mixed = False
        except Exception as error:  # noqa: BLE001  (told)
            log.warning("the update to version %d failed", update_info.version, exc_info=True)
            text = f"{type(error).__name__}: {error}"[:MAX_TEXT]
            self._changed |= self._lands_in_model
            self._mixed |= self._changed
        with suppress(Error):  # of a fleet that has ended the trainer knows
            worker.send_message("trainer 0", UPDATED, f"{update_info.ticket} {json.dumps({'error': text, 'changed': self._changed})}")

    def finish_weight_update(self) -> None:
        """Ends an update, whether it succeeded or not: vLLM has no other call for that."""
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

    def _failed_anywhere(self, own: Exception | None) -> Exception | None:
        """What failed in one of the engine's workers; all are in this call. vLLM takes the first exception of several
        workers', and the others for answers to later calls: all have to fail, and one to raise."""
        if self.parallel_config.world_size == 1:
            return own
        group = get_world_group()
        texts: list[str | None] = [None] * group.world_size
        torch.distributed.all_gather_object(texts, None if own is None else f"{type(own).__name__}: {own}"[:MAX_TEXT], group=group.cpu_group)
        found = next((f"worker {rank} of the engine: {text}" for rank, text in enumerate(texts) if text is not None), None)
        return own or (None if found is None else FailedPreconditionError(found))

    def _join(self, init_info: ShardpullInitInfo) -> None:
        self.shutdown()
        if init_info.package_version != __version__:
            raise FailedPreconditionError(f"the trainer has shardpull {init_info.package_version}, this worker {__version__}: they must be the same")
        if init_info.apply not in (None, "inplace", "staged"):
            raise InvalidArgumentError(f"apply must be 'inplace' or 'staged', not {init_info.apply!r}")
        parallel = self.vllm_config.parallel_config
        if parallel.enable_eplb:
            raise UnimplementedError("enable_eplb: experts that move between slots at run time would get the weights of others")
        consumer = self._consumer(init_info)
        self._staged = init_info.apply == "staged"
        self._lands_in_model = False
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
                self._lands_in_model = True
        self._update = update
        try:
            self._worker = Worker(model, consumer=consumer, **init_info.options(consumer))
        except BaseException:
            self._update = None
            raise
        for name, one in update.loadables.items():
            self._memory.setdefault(paths[one.module], {})[one.tensor] = from_dlpack(model.parameters()[name])

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

    def _receive(self, worker: Worker, update: LayerwiseUpdate, info: ShardpullUpdateInfo) -> None:
        self._landed.clear()
        update.begin()
        try:
            version = self._serve_one(worker, info)
            if version != info.version:
                raise FailedPreconditionError(f"the sync brought version {version}, the update was to bring {info.version}")
            for path in self._landed:
                self._process(path)
            update.finish()
        except BaseException:
            update.abort()
            raise

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
        self._changed = True
        self._update.process(self.model.get_submodule(path), self._memory[path])

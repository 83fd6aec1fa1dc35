"""The trainer's side: one call per sync, which tells the engines and runs the sync."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypedDict, Unpack

from .. import __version__
from .._errors import CancelledError, DeadlineExceededError, InvalidArgumentError
from .._fleet import FleetOptions, TrainerOptions
from .._fleet import Trainer as FleetTrainer
from .._native import SyncReport
from .._source import WeightSource
from ._clients import Client
from ._protocol import READY

GRACE_S = 5.0
"""How long a worker's own account of why it left the fleet may take longer than the engine's answer."""


class EngineOptions(TypedDict, total=False):
    """Of vLLM's workers; see WorkerOptions."""

    max_chunk_bytes: int
    chunk_split: int
    pull_split: int
    path: str
    conversions: str
    apply: str
    trace_file: str


class _Calls:
    """The same call of every client, each on a thread of its own."""

    def __init__(self, calls: Sequence[Callable[[], object]], failed: Callable[[BaseException], object] | None = None) -> None:
        self._errors: list[BaseException] = []
        self._failed = failed
        self._threads = [threading.Thread(target=self._run, args=(call,), name="shardpull-vllm", daemon=True) for call in calls]
        for thread in self._threads:
            thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001  (raised by whoever joins)
            self._errors.append(error)
            if self._failed is not None:
                self._failed(error)

    @property
    def error(self) -> BaseException | None:
        """The first."""
        return self._errors[0] if self._errors else None

    def join(self, timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineExceededError(f"{what} has not returned {timeout_s:g} s after the sync", fault="peer")


class Trainer:
    """One training process's side of a fleet whose workers are those of vLLM engines.

    On rank 0 it drives the engines by `client`, one or several, all with as many workers; other ranks have none. ``init()``
    joins them to the fleet, ``send_weights()`` pauses them, runs the sync, sets the weight version and resumes them.

    Args:
        source: this rank's weights.
        client: of each engine, on rank 0.
        engine: options of the engines' workers.
        timeout_s: how long an engine may take to begin an update, and to return from a call after the sync.
        options: those of shardpull.Trainer. `num_consumers` may be left out on rank 0, where the client can be asked.
            Workers take the token from their own environment, unless it is given here.
    """

    def __init__(
        self,
        source: WeightSource,
        client: Client | Sequence[Client] | None = None,
        *,
        engine: EngineOptions | None = None,
        timeout_s: float = 300.0,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._source = source
        self._clients: list[Client] = [] if client is None else list(client) if isinstance(client, Sequence) else [client]
        self._sender = options.get("rank", 0) == 0
        if self._sender != bool(self._clients):
            raise InvalidArgumentError("client: rank 0 drives the engines, and needs one or more; other ranks have none")
        self._engine: EngineOptions = engine or {}
        self._timeout_s = timeout_s
        if self._sender:
            options.setdefault("num_replicas", len(self._clients))
            if "num_consumers" not in options:
                options["num_consumers"] = sum(self._world_size(each) for each in self._clients)
        if "num_consumers" not in options:
            raise InvalidArgumentError("num_consumers: ranks other than 0 have to be told how many workers there are")
        self._options = options
        self._consumers = options["num_consumers"]
        self._ticket = 0
        self._joined = False
        self._whole = True
        options.setdefault("on_consumer_loss", "fail")
        self._trainer = FleetTrainer(**options)

    @property
    def fleet(self) -> FleetTrainer:
        """What runs the syncs."""
        return self._trainer

    def allocate(self, bytes: int, what: str = "weights") -> memoryview:
        """Memory that peers can reach, as shardpull.Trainer gives it: for sources, before init()."""
        return self._trainer.allocate(bytes, what)

    def init(self) -> None:
        """Joins the fleet, and the engines with it; a collective of all ranks. Raises what failed first, wherever that was."""
        if not self._sender:
            self._trainer.init(self._source)
            return
        over = threading.Event()

        def give_up(error: BaseException) -> None:
            if not over.wait(GRACE_S):  # a worker that was refused says so to the sender, whose error is the better one
                self._trainer.shutdown("an engine could not join", f"an engine could not join: {error}")

        calls = _Calls([functools.partial(client.init_weight_transfer_engine, self._init_info(i)) for i, client in enumerate(self._clients)], give_up)
        try:
            self._trainer.init(self._source)
        except CancelledError as error:
            if calls.error is None:
                raise
            raise calls.error from error
        finally:
            over.set()
        calls.join(self._timeout_s, "init_weight_transfer_engine")
        if calls.error is not None:
            raise calls.error
        self._joined = True

    def send_weights(self, version: int, names: Sequence[str] | None = None) -> SyncReport:
        """One sync, on every rank with the same arguments. On rank 0 the engines are paused and resumed around it.

        Where engines could not begin their update, nothing has changed, but the fleet has ended: begin with a new Trainer.
        When the sync fails the engines stay paused, since they may hold parts of two versions, but for those with
        ``apply="staged"``; the next one that succeeds brings all, and resumes them.
        """
        if not self._sender:
            return self._trainer.send_weights(version, names)
        self._whole = True
        try:
            report = self._send(version, names)
        except BaseException:
            if self._whole:
                with contextlib.suppress(Exception):
                    self._each("resume")
            raise
        self._each("resume")
        return report

    def _send(self, version: int, names: Sequence[str] | None) -> SyncReport:
        """`self._whole` says afterwards whether the engines have one version, so that they may go on."""
        self._ticket += 1
        self._each("pause")
        for client in self._clients:
            client.start_weight_update()
        info = {"version": version, "ticket": self._ticket}
        calls = _Calls([functools.partial(client.update_weights, dict(info)) for client in self._clients])
        try:
            self._wait_until_ready(calls)
        except BaseException as error:
            self._trainer.shutdown("an engine could not update", f"an engine could not update: {error}")  # the others wait for a sync
            raise
        self._whole = self._engine.get("apply") == "staged"
        try:
            report = self._trainer.send_weights(version, names)
        except BaseException:
            with contextlib.suppress(DeadlineExceededError):
                calls.join(self._timeout_s, "update_weights")
            raise
        self._whole = False
        calls.join(self._timeout_s, "update_weights")
        if calls.error is not None:
            raise calls.error
        for client in self._clients:
            client.finish_weight_update(str(version))
        self._each("reset_prefix_cache")
        return report

    def shutdown(self, reason: str = "the trainer has finished", why: str | None = None) -> None:
        """Ends the fleet (rank 0) or this rank; engines go on with the weights that they have."""
        self._trainer.shutdown(reason, why)
        if self._joined:
            self._joined = False
            with contextlib.suppress(Exception):
                self._each("shutdown_weight_transfer_engine")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown(why=None if error is None else f"{type(error).__name__}: {error}")

    # ---- Parts

    def _init_info(self, replica: int) -> dict[str, Any]:
        options: dict[str, Any] = {**self._options}
        shared = {name: options[name] for name in FleetOptions.__annotations__ if name in options}
        return {
            **shared,
            **self._engine,
            "package_version": __version__,
            "num_consumers": self._consumers,
            "num_replicas": len(self._clients),
            "replica_rank": replica,
        }

    def _wait_until_ready(self, calls: _Calls) -> None:
        ready: set[str] = set()
        deadline = time.monotonic() + self._timeout_s
        while len(ready) < self._consumers:
            if calls.error is not None:
                raise calls.error
            if time.monotonic() > deadline:
                raise DeadlineExceededError(
                    f"{len(ready)} of {self._consumers} workers are ready for the update after {self._timeout_s:g} s", fault="peer"
                )
            message = self._trainer.receive_message(50)
            if message is not None and message.topic == READY and message.body == str(self._ticket):
                ready.add(message.sender)

    @staticmethod
    def _world_size(client: Client) -> int:
        size = getattr(client, "world_size", None)
        if size is None:
            raise InvalidArgumentError("num_consumers: this client cannot be asked how many workers its engine has")
        return int(size())

    def _each(self, method: str) -> None:
        for client in self._clients:
            call = getattr(client, method, None)
            if call is not None:
                call()

"""The trainer's side: one call per sync, which tells the engines and runs the sync."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypedDict, Unpack

from .. import __version__
from .._errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from .._fleet import FleetMessage, FleetOptions, TrainerOptions
from .._fleet import Trainer as FleetTrainer
from .._native import SyncReport
from .._source import WeightSource
from ._clients import Client
from ._protocol import GIVEN_UP, READY

GRACE_S = 5.0
"""How long a worker's own account of why it left the fleet may take longer than the engine's answer."""

DEAD_AFTER_MS = 5000
"""The default of FleetOptions.dead_after_ms."""


class EngineOptions(TypedDict, total=False):
    """Of vLLM's workers; see WorkerOptions."""

    max_chunk_bytes: int
    chunk_split: int
    pull_split: int
    path: str
    conversions: str
    apply: str
    trace_file: str


class _Engine:
    """One engine, and how far this sync has got with it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.replica = 0
        self.workers: frozenset[str] = frozenset()
        """Their names in the fleet."""
        self.lost: UnavailableError | None = None
        """How one of its workers was lost. Nobody speaks to it until it joins again."""
        self.started = False
        """It has begun an update, which only update_weights ends."""
        self.whole = True
        """It has one version, so that it may go on; where not, the next sync has to bring all names."""

    def __str__(self) -> str:
        return f"engine {self.replica}"

    def call(self, method: str) -> None:
        """A method that not every client has."""
        found = getattr(self.client, method, None)
        if found is not None:
            found()


class _Calls:
    """The same call of several engines, each on a thread of its own."""

    def __init__(self, engines: Sequence[_Engine], call: Callable[[_Engine], object], failed: Callable[[BaseException], object] | None = None) -> None:
        self.errors: dict[_Engine, BaseException] = {}
        self._failed = failed
        self._threads = {
            engine: threading.Thread(target=self._run, args=(engine, call), name="shardpull-vllm", daemon=True) for engine in engines
        }
        for thread in self._threads.values():
            thread.start()

    def _run(self, engine: _Engine, call: Callable[[_Engine], object]) -> None:
        try:
            call(engine)
        except BaseException as error:  # noqa: BLE001  (raised by whoever joins)
            self.errors[engine] = error
            if self._failed is not None:
                self._failed(error)

    @property
    def error(self) -> BaseException | None:
        """The first."""
        return next(iter(self.errors.values()), None)

    def join(self) -> None:
        """As long as the clients let a call take."""
        for thread in self._threads.values():
            thread.join()

    def join_within(self, timeout_s: float, what: str, engines: Iterable[_Engine]) -> None:
        deadline = time.monotonic() + timeout_s
        for engine in engines:
            thread = self._threads[engine]
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise DeadlineExceededError(f"{what} of {engine} has not returned {timeout_s:g} s after the sync", fault="peer")


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
        clients: list[Client] = [] if client is None else list(client) if isinstance(client, Sequence) else [client]
        self._sender = options.get("rank", 0) == 0
        if self._sender != bool(clients):
            raise InvalidArgumentError("client: rank 0 drives the engines, and needs one or more; other ranks have none")
        self._engines = [_Engine(each) for each in clients]
        self._engine: EngineOptions = engine or {}
        self._timeout_s = timeout_s
        if self._sender:
            options.setdefault("num_replicas", len(clients))
            if "num_consumers" not in options:
                options["num_consumers"] = sum(self._world_size(each) for each in clients)
        if "num_consumers" not in options:
            raise InvalidArgumentError("num_consumers: ranks other than 0 have to be told how many workers there are")
        options.setdefault("on_consumer_loss", "fail")
        self._options = options
        self._consumers = options["num_consumers"]
        for replica, one in enumerate(self._engines):
            own = self._consumers // len(self._engines)
            one.replica = replica
            one.workers = frozenset(f"worker {replica * own + i}" for i in range(own))
        self._ticket = 0
        self._joined = False
        self._busy = threading.Lock()
        self._trainer = FleetTrainer(**options)

    @property
    def fleet(self) -> FleetTrainer:
        """What runs the syncs."""
        return self._trainer

    @property
    def lost(self) -> list[int]:
        """The engines that have lost a worker and not joined again, by their places among the clients."""
        return [engine.replica for engine in self._engines if engine.lost is not None]

    def allocate(self, bytes: int, what: str = "weights") -> memoryview:
        """Memory that peers can reach, as shardpull.Trainer gives it: for sources, before init()."""
        return self._trainer.allocate(bytes, what)

    def init(self) -> None:
        """Joins the fleet, and the engines with it; a collective of all ranks. Raises what failed first, wherever that was."""
        if not self._sender:
            self._trainer.init(self._source)
            return
        for engine in self._engines:
            if hasattr(engine.client, "world_size") and self._world_size(engine.client) != len(engine.workers):
                raise InvalidArgumentError(
                    f"num_consumers is {self._consumers} for {len(self._engines)} engines, "
                    f"but {engine} has {self._world_size(engine.client)} workers; all have as many"
                )
        over = threading.Event()

        def give_up(error: BaseException) -> None:
            if not over.wait(GRACE_S):  # a worker that was refused says so to the sender, whose error is the better one
                self._trainer.shutdown("an engine could not join", f"an engine could not join: {error}")

        calls = _Calls(self._engines, lambda engine: engine.client.init_weight_transfer_engine(self._init_info(engine.replica)), give_up)
        try:
            self._trainer.init(self._source)
        except CancelledError as error:
            if calls.error is None:
                raise
            raise calls.error from error
        finally:
            over.set()
        calls.join_within(self._timeout_s, "init_weight_transfer_engine", self._engines)
        if calls.error is not None:
            raise calls.error
        self._joined = True

    def rejoin(self, replica: int, client: Client | None = None) -> None:
        """Rank 0: an engine that was started anew joins the fleet in the place of one that was lost, and is in the next sync.

        Args:
            replica: its place among the clients.
            client: of the new engine, where that is another.
        """
        if not 0 <= replica < len(self._engines):
            raise InvalidArgumentError(f"replica is {replica}, of {len(self._engines)} engines")
        with self._alone("rejoin"):
            if not self._joined:
                raise FailedPreconditionError("rejoin before init, or after shutdown")
            engine = self._engines[replica]
            engine.client = client or engine.client
            engine.client.init_weight_transfer_engine(self._init_info(replica))
            self._take_in_losses()  # of the life before: its end was known before this one could join
            engine.lost, engine.started, engine.whole = None, False, False

    def send_weights(self, version: int, names: Sequence[str] | None = None) -> SyncReport:
        """One sync, on every rank with the same arguments. On rank 0 the engines are paused and resumed around it.

        An engine that cannot be paused, or begin an update, raises here alone, and other ranks go on waiting for the sync
        (connect_timeout_ms at most): call again. Where one began its update and failed before the sync did, nothing has
        changed, but the fleet has ended: begin with a new Trainer. When the sync itself fails the engines stay paused, since
        they may hold parts of two versions, but for those with ``apply="staged"``; the next one that succeeds brings all, and
        resumes them.

        An engine that has lost a worker is in `lost` until rejoin(). Until then every sync fails; with
        ``on_consumer_loss="continue"`` it goes on for the others.
        """
        if not self._sender:
            return self._trainer.send_weights(version, names)
        with self._alone("send_weights"):
            self._take_in_losses()
            self._check_losses()
            if names is not None and not all(engine.whole for engine in self._live()):
                raise FailedPreconditionError("names: after a sync that failed, or an engine that joined again, all are to be sent")
            try:
                return self._send(version, names)
            except BaseException:
                for engine in self._live():
                    if engine.started:
                        self._give_up(engine)
                    if engine.whole:
                        with contextlib.suppress(Exception):
                            engine.call("resume")
                raise

    def _send(self, version: int, names: Sequence[str] | None) -> SyncReport:
        self._ticket += 1
        info = {"version": version, "ticket": self._ticket}
        self._each(lambda engine: engine.call("pause"))
        self._each(self._start)
        engines = self._live()
        for engine in engines:
            engine.started = False
        calls = _Calls(engines, lambda engine: engine.client.update_weights(dict(info)))
        try:
            self._wait_until_ready(calls)
        except BaseException as error:
            if self._live():  # these serve, and nothing else ends that
                self._trainer.shutdown("an engine could not update", f"an engine could not update: {error}")
            raise
        for engine in self._live():
            engine.whole &= self._engine.get("apply") == "staged"
        try:
            report = self._trainer.send_weights(version, names)
        except BaseException as error:
            if isinstance(error, UnavailableError) and error.reason == "peer_lost":
                self._lose(error)  # whose own notice may still be on its way
            with contextlib.suppress(DeadlineExceededError):
                calls.join_within(self._timeout_s, "update_weights", self._live())
            raise
        for consumer in (*report.lost_consumers, *report.dropped_consumers):
            worker = f"worker {consumer}"
            self._lose(UnavailableError(f"{worker} was lost in sync {report.sync_id}", fault="peer", reason="peer_lost", peer=worker))
        for engine in self._live():
            engine.whole = False
        calls.join_within(self._timeout_s, "update_weights", self._live())
        updated = [engine for engine in self._live() if engine not in calls.errors]
        self._each(lambda engine: self._complete(engine, version), updated)
        self._check(calls)
        self._check_losses()
        return report

    def shutdown(self, reason: str = "the trainer has finished", why: str | None = None) -> None:
        """Ends the fleet (rank 0) or this rank; engines go on with the weights that they have."""
        self._trainer.shutdown(reason, why)
        if self._joined:
            self._joined = False
            with contextlib.suppress(Exception):
                self._each(lambda engine: engine.call("shutdown_weight_transfer_engine"))

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown(why=None if error is None else f"{type(error).__name__}: {error}")

    # ---- Parts

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise FailedPreconditionError(f"{what} while another thread's call of this trainer runs")
        try:
            yield
        finally:
            self._busy.release()

    def _init_info(self, replica: int) -> dict[str, Any]:
        options: dict[str, Any] = {**self._options}
        shared = {name: options[name] for name in FleetOptions.__annotations__ if name in options}
        return {
            **shared,
            **self._engine,
            "package_version": __version__,
            "num_consumers": self._consumers,
            "num_replicas": len(self._engines),
            "replica_rank": replica,
        }

    def _live(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.lost is None]

    @staticmethod
    def _give_up(engine: _Engine) -> None:
        engine.started = False
        with contextlib.suppress(Exception):  # it always raises
            engine.client.update_weights({"version": 0, "ticket": GIVEN_UP})

    def _start(self, engine: _Engine) -> None:
        engine.started = True  # as long as it is not known to have failed before it got there
        try:
            engine.client.start_weight_update()
        except Exception:  # an update that a trainer before this one has begun, and not lived to end?
            self._give_up(engine)
            engine.started = True
            engine.client.start_weight_update()

    @staticmethod
    def _complete(engine: _Engine, version: int) -> None:
        engine.client.finish_weight_update(str(version))
        engine.call("reset_prefix_cache")
        engine.whole = True
        engine.call("resume")

    def _each(self, call: Callable[[_Engine], object], engines: Sequence[_Engine] | None = None) -> None:
        """Calls them all at once; raises what failed first, but of engines that are lost and that syncs go on without."""
        engines = self._live() if engines is None else engines
        if len(engines) == 1:
            call(engines[0])  # on this thread, where Ctrl-C ends it
            return
        calls = _Calls(engines, call)
        calls.join()
        self._check(calls)
        self._check_losses()

    def _check(self, calls: _Calls) -> None:
        """Raises what failed first, but of engines that turn out soon to have lost a worker."""
        deadline = time.monotonic() + self._options.get("dead_after_ms", DEAD_AFTER_MS) / 1000 + GRACE_S
        for engine, error in list(calls.errors.items()):
            while engine.lost is None and (self._goes_on or isinstance(error, ConnectionError)) and time.monotonic() < deadline:
                self._heard(50)
            if engine.lost is None:
                raise error

    @property
    def _goes_on(self) -> bool:
        return self._options.get("on_consumer_loss") == "continue"

    def _check_losses(self) -> None:
        """Raises one that syncs do not go on without."""
        losses = [engine.lost for engine in self._engines if engine.lost is not None]
        if losses and not (self._goes_on and self._live()):
            raise losses[0]

    def _lose(self, loss: UnavailableError) -> None:
        for engine in self._engines:
            if loss.peer in engine.workers and engine.lost is None:
                engine.lost = loss

    def _take_in_losses(self) -> None:
        while self._heard(0) is not None:
            pass

    def _heard(self, timeout_ms: int) -> FleetMessage | None:
        """The next message, or what it is that a member was lost. Ranks' losses are the sync's to judge."""
        try:
            return self._trainer.receive_message(timeout_ms)
        except UnavailableError as error:
            if error.reason != "peer_lost" or error.peer in ("", "trainer 0"):
                raise
            self._lose(error)
            return FleetMessage(error.peer, "", str(error))
        except ResourceExhaustedError as error:  # messages of the program's own, which nobody read
            return FleetMessage("", "", str(error))

    def _wait_until_ready(self, calls: _Calls) -> None:
        """Until all workers serve, but those of engines that are lost: with these the sync, which begins then, fails everywhere."""
        ready: set[str] = set()
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._check(calls)
            if self._goes_on:
                self._check_losses()
            awaited = {worker for engine in self._live() for worker in engine.workers} - ready
            if not awaited:
                return
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"not ready for the update after {self._timeout_s:g} s: {', '.join(sorted(awaited))}", fault="peer")
            message = self._heard(50)
            if message is not None and message.topic == READY and message.body == str(self._ticket):
                ready.add(message.sender)

    @staticmethod
    def _world_size(client: Client) -> int:
        size = getattr(client, "world_size", None)
        if size is None:
            raise InvalidArgumentError("num_consumers: this client cannot be asked how many workers its engine has")
        return int(size())

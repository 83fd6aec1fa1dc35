"""The trainer's side: one call per sync, which tells the engines and runs the sync."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

from .. import __version__
from .._errors import (
    CancelledError,
    DeadlineExceededError,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    InvalidTypeError,
    ResourceExhaustedError,
    UnavailableError,
)
from .._fleet import FleetOptions, TrainerOptions
from .._fleet import Trainer as FleetTrainer
from .._native import SyncReport
from .._source import WeightSource
from ._clients import Client
from ._protocol import JOINED, READY, UPDATED

GRACE_S = 5.0
"""How long a worker's own account of why it left the fleet may take longer than the engine's answer."""

DRAIN_S = 15.0
"""A sync that has failed has ended in every worker by then; what still waits, waits for one that was never opened."""

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
    """One engine, and what is known of it."""

    def __init__(self, client: Client, replica: int, workers: Iterable[int]) -> None:
        self.client = client
        self.replica = replica
        self.workers = frozenset(f"worker {worker}" for worker in workers)
        """Their names in the fleet."""
        self.losses: dict[str, UnavailableError] = {}
        """How its workers were lost, or it itself; while there is one, nobody speaks to it until it joins again."""
        self.update: Literal["none", "begun", "unknown"] = "none"
        """Whether it is in one, as vLLM counts: from a start to a finish. "unknown" after a call that was broken off."""
        self.whole = True
        """It has one version, so that it may go on."""
        self.complete = False
        """All of it has come by syncs of this trainer's, so that some names may come alone."""

    def __str__(self) -> str:
        return f"engine {self.replica}"

    @property
    def lost(self) -> UnavailableError | None:
        return next(iter(self.losses.values()), None)

    def call(self, method: str) -> Any:
        """A method that not every client has."""
        found = getattr(self.client, method, None)
        return None if found is None else found()

    def world_size(self) -> int | None:
        """None: this client cannot be asked."""
        size = self.call("world_size")
        return None if size is None else int(size)


class _Calls:
    """The same call of several engines, each on a thread of its own."""

    def __init__(self, engines: Iterable[_Engine], call: Callable[[_Engine], object], failed: Callable[[BaseException], object] | None = None) -> None:
        self.errors: dict[_Engine, BaseException] = {}
        self._failed = failed
        self._threads = {engine: threading.Thread(target=self._run, args=(engine, call), name="shardpull-vllm", daemon=True) for engine in engines}
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

    def running(self, engine: _Engine) -> bool:
        return engine in self._threads and self._threads[engine].is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """None: as long as the clients let a call take."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads.values():
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))


class Trainer:
    """One training process's side of a fleet whose workers are those of vLLM engines.

    On rank 0 it drives the engines by `client`, one or several, all with as many workers; other ranks have none. ``init()``
    joins them to the fleet, ``send_weights()`` pauses them, runs the sync, sets the weight version and resumes them.

    Args:
        source: this rank's weights.
        client: of each engine, on rank 0.
        engine: options of the engines' workers.
        timeout_s: how long an engine may take until it is ready for a sync, and to take in what the sync has brought. How long one
            call may take is the client's to say.
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
        self._engine: EngineOptions = engine or {}
        for option in self._engine:
            if option not in EngineOptions.__annotations__:
                raise InvalidArgumentError(f"engine: there is no option '{option}'; there are {', '.join(EngineOptions.__annotations__)}")
        self._timeout_s = timeout_s
        if self._sender:
            options.setdefault("num_replicas", len(clients))
            if "num_consumers" not in options:
                sizes = [_Engine(each, 0, ()).world_size() for each in clients]
                if None in sizes:
                    raise InvalidArgumentError("num_consumers: this client cannot be asked how many workers its engine has")
                options["num_consumers"] = sum(size or 0 for size in sizes)
        if "num_consumers" not in options:
            raise InvalidArgumentError("num_consumers: ranks other than 0 have to be told how many workers there are")
        options.setdefault("on_consumer_loss", "fail")
        self._options = options
        self._goes_on = options["on_consumer_loss"] == "continue"
        self._consumers = options["num_consumers"]
        own = self._consumers // max(1, len(clients))
        self._engines = [_Engine(each, i, range(i * own, (i + 1) * own)) for i, each in enumerate(clients)]
        self._state = "new"
        self._why_ended = ""
        self._ticket = 0
        self._said: dict[str, dict[str, str]] = {JOINED: {}, READY: {}, UPDATED: {}}
        """What workers have said of this ticket: by topic and worker."""
        self._open: list[_Calls] = []
        """That may not have returned, as a call was interrupted, or took too long."""
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
        """Joins the fleet, and the engines with it, once; a collective of all ranks. Raises what failed first, wherever that was."""
        if not self._sender:
            self._trainer.init(self._source)
            return
        if self._state != "new":
            raise FailedPreconditionError("init a second time, or after shutdown: make a new Trainer")
        for engine in self._engines:
            self._meet(engine)
        self._begin()
        self._state = "joined"  # also where it fails: engines that have joined are told to leave
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
        calls.join(self._timeout_s)
        for engine in self._engines:
            if calls.running(engine):
                raise DeadlineExceededError(f"init_weight_transfer_engine of {engine} has not returned {self._timeout_s:g} s after it joined", fault="peer")
        if calls.error is not None:
            raise calls.error
        self._wait_until_joined(self._engines)

    def rejoin(self, replica: int, client: Client | None = None) -> None:
        """Rank 0: an engine that was started anew joins the fleet in the place of one that was lost, and is in the next sync.

        Args:
            replica: its place among the clients.
            client: of the new engine, where that is another.
        """
        if not 0 <= replica < len(self._engines):
            raise InvalidArgumentError(f"replica is {replica}, of {len(self._engines)} engines")
        with self._alone("rejoin"):
            engine = self._engines[replica]
            engine.client = client or engine.client
            self._meet(engine)
            self._begin()
            try:
                engine.client.init_weight_transfer_engine(self._init_info(replica))
                self._wait_until_joined([engine])
            except BaseException as error:
                with contextlib.suppress(Exception):
                    engine.call("shutdown_weight_transfer_engine")  # or syncs would wait for it
                engine.losses.setdefault("", UnavailableError(f"{engine} could not join again: {error}", fault="peer", reason="peer_lost"))
                raise
            engine.losses.pop("", None)
            engine.update, engine.complete = "none", False

    def send_weights(self, version: int, names: Sequence[str] | None = None) -> SyncReport:
        """One sync, on every rank with the same arguments. On rank 0 the engines are paused and resumed around it.

        What is refused before engines are ready for the sync raises here alone, and other ranks go on waiting for it
        (`stall_timeout_ms` and `connect_timeout_ms` at most): call again. So do arguments that are wrong, an engine that cannot be
        paused or begin an update, and `names` where not all of an engine has come by this trainer's syncs, or where one failed
        within an engine. An engine that fails as it gets ready ends the fleet, with nothing changed: begin with a new Trainer.

        When the sync fails, engines whose model has parts of it stay paused; the next one that succeeds brings all, and resumes
        them. With ``apply="staged"`` that can only be an engine which fails as it takes in what has come whole.

        An engine that has lost a worker is in `lost` until rejoin(). Until then every sync fails; with
        ``on_consumer_loss="continue"`` it goes on for the others.
        """
        if not self._sender:
            return self._trainer.send_weights(version, names)
        version, names = self._arguments(version, names)
        with self._alone("send_weights"):
            self._take_in()
            self._check_losses()
            if names is not None and not all(engine.complete for engine in self._live()):
                raise FailedPreconditionError(
                    "names: all are to be sent first. A new trainer, an engine that joined again and a sync that failed leave it open what an engine has"
                )
            self._begin()
            try:
                self._each(lambda engine: engine.call("pause"))
                self._each(self._start)
                info = {"version": version, "ticket": self._ticket}
                calls = self._calls(self._live(), lambda engine: engine.client.update_weights(dict(info)))
                try:
                    self._wait_until_ready(calls)
                except BaseException as error:
                    for engine in calls.errors:
                        engine.update = "unknown"
                    if self._live():  # these serve, and nothing else ends that
                        self._end(f"an engine could not update: {error}")
                        calls.join(DRAIN_S)
                    raise
                return self._sync(version, names, calls)
            except BaseException:
                self._settle()
                raise

    def shutdown(self, reason: str = "the trainer has finished", why: str | None = None) -> None:
        """Ends the fleet (rank 0) or this rank; engines go on with the weights that they have."""
        self._trainer.shutdown(reason, why)
        if self._state in ("joined", "ended"):
            self._state = "over"
            _Calls([engine for engine in self._live() if engine.update == "none"], lambda engine: engine.call("shutdown_weight_transfer_engine")).join(DRAIN_S)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown(why=None if error is None else f"{type(error).__name__}: {error}")

    # ---- A sync

    def _arguments(self, version: int, names: Sequence[str] | None) -> tuple[int, Sequence[str] | None]:
        """What the fleet's trainer would refuse, before engines wait for it."""
        try:
            version = operator.index(version)
        except TypeError:
            raise InvalidTypeError(f"version must be an int, not {type(version).__name__}") from None
        if not 0 <= version < 2**64:
            raise InvalidArgumentError(f"version must be from 0 to 2**64 - 1, not {version}")
        if names is None:
            return version, None
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise InvalidTypeError("names must be a sequence of patterns of checkpoint names")
        known = [meta.name for meta in self._source.metadata()]
        for pattern in names:
            if "\\" not in pattern and not any(fnmatch.fnmatchcase(name, pattern) for name in known):
                raise InvalidArgumentError(f"names: no name of the model matches '{pattern}'")
        return version, list(names) or None

    def _sync(self, version: int, names: Sequence[str] | None, calls: _Calls) -> SyncReport:
        """All engines serve: the sync itself, and what they make of it."""
        before = {engine: (engine.whole, engine.complete) for engine in self._live()}
        for engine in before:
            engine.whole = engine.complete = False  # until it has said how it went
        failed: BaseException | None = None
        try:
            report = self._trainer.send_weights(version, names)
        except BaseException as error:  # noqa: BLE001  (raised below)
            failed = error
            if isinstance(error, UnavailableError) and error.reason == "peer_lost":
                self._lose(error)  # whose own notice may still be on its way
        else:
            for consumer in report.lost_consumers:
                worker = f"worker {consumer}"
                self._lose(UnavailableError(f"{worker} was lost in sync {report.sync_id}", fault="peer", reason="peer_lost", peer=worker))
        self._wait_until_updated(calls, failed)
        errors: dict[_Engine, BaseException] = {}
        updated, refused = [], []
        for engine in self._live():
            outcome = self._outcome(engine, calls)
            was_whole, was_complete = before[engine]
            if outcome.error is None:
                engine.complete = was_complete or names is None
                updated.append(engine)
            else:
                errors[engine] = outcome.error
                engine.whole = was_whole and not outcome.changed
                if engine in calls.errors:
                    engine.update = "unknown"
                elif not calls.running(engine):
                    refused.append(engine)
        ending = self._calls(updated, lambda engine: self._complete(engine, version))
        leaving = self._calls(refused, self._abandon)
        ending.join()
        leaving.join()
        if failed is not None:
            raise failed
        calls.errors.update(errors)
        calls.errors.update(ending.errors)
        self._check(calls)
        self._check_losses()
        return report

    @staticmethod
    def _finish(engine: _Engine, version: int | None = None) -> None:
        """Ends its update. Without a version: one that failed, or never came; vLLM has no other call for that."""
        engine.update = "unknown"
        engine.client.finish_weight_update(None if version is None else str(version))
        engine.update = "none"

    def _complete(self, engine: _Engine, version: int) -> None:
        self._finish(engine, version)
        engine.call("reset_prefix_cache")
        engine.whole = True
        engine.call("resume")

    def _abandon(self, engine: _Engine) -> None:
        """One that is not whole stays paused."""
        self._finish(engine)
        if engine.whole:
            engine.call("resume")

    def _start(self, engine: _Engine) -> None:
        if engine.update == "begun":  # its answer came too late to end it
            self._finish(engine)
        elif engine.update == "unknown":
            self._end_unknown(engine)
        engine.update = "unknown"
        engine.client.start_weight_update()
        engine.update = "begun"

    def _end_unknown(self, engine: _Engine) -> None:
        """To vLLM a call that does not fit is an error, after which it mixes up the answers of several workers: only one is asked."""
        if len(engine.workers) > 1:
            loss = UnavailableError(f"{engine} broke off a call, and nobody knows whether it is in an update: rejoin() it", fault="peer", reason="peer_lost")
            engine.losses.setdefault("", loss)
            raise loss
        with contextlib.suppress(Exception):  # there may be none, or the line may be broken
            self._finish(engine)

    def _settle(self) -> None:
        """After a call that raises: engines with one version go on, if they are where that is known."""
        for engine in self._live():
            if any(calls.running(engine) for calls in self._open):
                continue
            with contextlib.suppress(Exception):
                if engine.update == "begun":
                    self._finish(engine)
                elif engine.update == "unknown":
                    self._end_unknown(engine)
            if engine.whole:
                with contextlib.suppress(Exception):
                    engine.call("resume")

    # ---- What workers say

    @dataclass
    class _Outcome:
        """Of an update, in one engine."""

        error: BaseException | None = None
        changed: bool = False
        """Its model has parts of what came, or nobody knows."""

    def _outcome(self, engine: _Engine, calls: _Calls) -> _Outcome:
        said = {worker: json.loads(self._said[UPDATED][worker]) for worker in sorted(engine.workers) if worker in self._said[UPDATED]}
        failed = [FailedPreconditionError(f"{worker}: {one['error']}", fault="peer", peer=worker) for worker, one in said.items() if one["error"]]
        changed = len(said) < len(engine.workers) or any(one["changed"] for one in said.values())
        if engine in calls.errors:
            return self._Outcome(calls.errors[engine], changed)
        if failed:
            return self._Outcome(failed[0], changed)
        if len(said) < len(engine.workers) or calls.running(engine):
            missing = ", ".join(sorted(engine.workers - said.keys())) or str(engine)
            return self._Outcome(DeadlineExceededError(f"{missing}: no answer to the update {self._timeout_s:g} s after the sync", fault="peer"), True)
        return self._Outcome()

    def _wait_until_joined(self, engines: Sequence[_Engine]) -> None:
        awaited = {worker for engine in engines for worker in engine.workers}
        deadline = time.monotonic() + self._timeout_s
        while not awaited <= self._said[JOINED].keys():
            if time.monotonic() > deadline:
                missing = ", ".join(sorted(awaited - self._said[JOINED].keys()))
                raise DeadlineExceededError(f"{missing}: joined, and has not said so within {self._timeout_s:g} s", fault="peer")
            self._heard(50)

    def _wait_until_ready(self, calls: _Calls) -> None:
        """Until all workers serve, but those of engines that are lost: with these the sync, which begins then, fails everywhere."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._check(calls)
            if self._goes_on or not self._live():
                self._check_losses()
            awaited = {worker for engine in self._live() for worker in engine.workers} - self._said[READY].keys()
            if not awaited:
                return
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"not ready for the update after {self._timeout_s:g} s: {', '.join(sorted(awaited))}", fault="peer")
            self._heard(50)

    def _wait_until_updated(self, calls: _Calls, failed: BaseException | None) -> None:
        """Until every engine has said how its update went, or cannot. One that waits for a sync that was never opened is let go."""
        deadline = time.monotonic() + (self._timeout_s if failed is None else DRAIN_S)

        def awaited() -> bool:
            return any(
                calls.running(engine) or (engine not in calls.errors and not engine.workers <= self._said[UPDATED].keys()) for engine in self._live()
            )

        while awaited() and time.monotonic() < deadline and self._state == "joined":
            try:
                self._heard(50)
            except Error as error:  # the fleet has ended
                self._why_ended, self._state = str(error), "ended"
        if failed is not None and any(calls.running(engine) for engine in self._live()):
            self._end(f"a sync failed before it began: {failed}")
            calls.join(DRAIN_S)

    def _take_in(self) -> None:
        while self._heard(0):
            pass

    def _heard(self, timeout_ms: int) -> bool:
        """Takes in the next message, or who was lost. Ranks' losses are the sync's to judge."""
        try:
            message = self._trainer.receive_message(timeout_ms)
        except ResourceExhaustedError:  # messages of the program's own, which nobody read
            return True
        except UnavailableError as error:
            if error.reason != "peer_lost" or error.peer in ("", "trainer 0"):
                raise
            self._lose(error)
            return True
        if message is None:
            return False
        about, _, body = message.body.partition(" ")
        if message.topic in self._said and about == str(self._ticket):
            self._said[message.topic][message.sender] = body
            for engine in self._engines:
                if message.topic == JOINED and message.sender in engine.workers:
                    engine.losses.pop(message.sender, None)  # said of the life before
                    engine.whole &= body != "mixed"
        return True

    # ---- Losses

    def _live(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.lost is None]

    def _lose(self, loss: UnavailableError) -> None:
        for engine in self._engines:
            if loss.peer in engine.workers:
                engine.losses.setdefault(loss.peer, loss)

    def _check_losses(self) -> None:
        """Raises one that syncs do not go on without."""
        losses = [engine.lost for engine in self._engines if engine.lost is not None]
        if losses and not (self._goes_on and self._live()):
            raise losses[0]

    def _check(self, calls: _Calls) -> None:
        """Raises what failed first, but of engines that turn out soon to have lost a worker."""
        deadline = time.monotonic() + self._options.get("dead_after_ms", DEAD_AFTER_MS) / 1000 + 1
        for engine, error in list(calls.errors.items()):
            if isinstance(error, (FailedPreconditionError, DeadlineExceededError)) and error.peer:
                raise error  # a worker's own
            while engine.lost is None and time.monotonic() < deadline and self._state == "joined":
                self._heard(50)
            if engine.lost is None:
                raise error

    # ---- Parts

    @contextlib.contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise FailedPreconditionError(f"{what} while another thread's call of this trainer runs")
        try:
            if self._state == "ended":
                raise FailedPreconditionError(f"{what}: the fleet has ended ({self._why_ended}); begin with a new Trainer")
            if self._state != "joined":
                raise FailedPreconditionError(f"{what} before init, or after shutdown")
            for calls in self._open:
                calls.join(self._timeout_s)
                for engine in self._live():
                    if calls.running(engine):
                        raise FailedPreconditionError(f"{what}: a call of {engine} that was broken off has not returned yet", fault="peer")
            self._open.clear()
            yield
        finally:
            self._busy.release()

    def _end(self, why: str) -> None:
        """Of the fleet: what workers wait for will not come."""
        self._state, self._why_ended = "ended", why
        self._trainer.shutdown("a sync could not begin", why)

    def _begin(self) -> None:
        """What workers say from now on is of another ticket."""
        self._ticket += 1
        for said in self._said.values():
            said.clear()

    def _meet(self, engine: _Engine) -> None:
        """Before it joins: what it is, and whether it runs."""
        size = engine.world_size()
        if size is not None and size != len(engine.workers):
            raise InvalidArgumentError(
                f"num_consumers is {self._consumers} for {len(self._engines)} engines, but {engine} has {size} workers; give {size * len(self._engines)}, or none"
            )
        engine.whole = not engine.call("is_paused")

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
            "ticket": self._ticket,
        }

    def _calls(self, engines: Iterable[_Engine], call: Callable[[_Engine], object]) -> _Calls:
        calls = _Calls(engines, call)
        self._open.append(calls)
        return calls

    def _each(self, call: Callable[[_Engine], object]) -> None:
        """Calls all that are there at once; raises what failed first, but of engines that are lost and that syncs go on without."""
        engines = self._live()
        if len(engines) == 1:
            call(engines[0])  # on this thread, where Ctrl-C ends it
            return
        calls = self._calls(engines, call)
        calls.join()
        if self._goes_on:
            self._check(calls)
            self._check_losses()
        elif calls.error is not None:
            raise calls.error

"""Trainer and Worker."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, NamedTuple, TypedDict, Unpack

from . import _native
from ._errors import Error, InvalidTypeError
from ._model import Model
from ._source import WeightSource


class FleetOptions(TypedDict, total=False):
    """What every process of a fleet shares; names and defaults are those of include/shardpull/fleet.h."""

    directory: str
    """Owner-only, on this host: holds the sockets of what travels within it. All processes of a fleet give the same."""
    token: int
    """Random, 1 to 2**64 - 1, one per fleet. Absent: the environment's SHARDPULL_TOKEN, 16 hexadecimal digits."""
    connect_timeout_ms: int
    """How long a process waits for the others to appear; 60,000."""
    stall_timeout_ms: int
    """A running sync without progress for this long fails; 300,000."""
    heartbeat_ms: int
    """How often processes show each other that they live; 500."""
    dead_after_ms: int
    """A process that shows no sign of life for this long is dead; 5,000."""
    settings: str
    """What the programs on top were given, a setting a line; a process whose text is another is refused as it joins."""
    rendezvous: str
    """"HOST:PORT" where the sender listens and the others meet it, in the place of the directory."""
    insecure_listen: bool
    """Lets this process listen where other hosts reach it: neither the token nor the weights are encrypted."""
    transport: Literal["auto", "shm", "cma", "tcp", "ucx"]
    """What carries the bytes, the same for all processes; "auto" is tcp with a rendezvous, else shm."""
    interfaces: str
    """Of tcp and ucx: network interfaces to use, "eth0,eth1"; empty: the one that leads to the rendezvous."""
    ucx_workers: int
    """Of tcp and ucx: 1 to 16 streams to each peer, each with a thread of its own."""


class TrainerOptions(FleetOptions, total=False):
    """Those of include/shardpull/trainer.h."""

    rank: int
    """0 to world_size - 1; 0, the default, is the sender."""
    world_size: int
    """How many trainer ranks there are; 1."""
    num_consumers: int
    """How many workers there are, over all replicas; 1."""
    num_replicas: int
    """How many engines the workers are; num_consumers must divide by it."""
    workers_per_replica: int
    """0, the default: num_consumers / num_replicas."""
    ring_depth: int
    """Slots, and pulls in flight; 2."""
    lookahead: int
    """Groups that a rank may hold beyond the one being pulled; 1."""
    presize_bytes: int
    """Floor for the bytes of a slot; 0: what the plan needs."""
    export_pack_limit_bytes: int
    """Storages up to this size are packed into export buffers; 64 MiB."""
    on_consumer_loss: Literal["continue", "fail"]
    """What a lost worker leads to: the sync goes on without its replica, or fails everywhere."""
    publish: Literal["auto", "gather", "resident"]
    """How this rank publishes: as its source says (auto), or one of the two for all."""
    integrity: Literal["off", "wire", "full"]
    """What is summed and compared before it is used: nothing, what crosses a transport other than shm, or everything."""
    trainer_settings: str
    """TrainerOptions::settings: what the programs on top were given, of the ranks alone."""
    trace_file: str
    """A file to write the timelines of all syncs to, in Trace Event JSON."""


class WorkerOptions(FleetOptions, total=False):
    """Those of include/shardpull/worker.h."""

    consumer: int
    """This worker's number over the whole fleet, from 0."""
    ring_depth: int
    """0, the default: the fleet's. Another number is refused, naming both."""
    max_chunk_bytes: int
    """No chunk is larger unless a single row is; 64 MiB, 0 for no limit."""
    chunk_split: int
    """Pieces of about equal bytes that a group's chunk is cut into; 1."""
    pull_split: int
    """Ranks that one chunk is pulled from at once; 1."""
    path: Literal["auto", "packed", "mapped", "direct"]
    """How this worker's bytes travel."""
    apply: Literal["inplace", "staged"]
    """Where syncs land: in the parameters, or beside them until the commit."""
    enable_eplb: bool
    """Whether the engine around moves experts at run time, which is refused; None, where that is not known, too."""
    conversions: Literal["allow", "widen", "refuse"]
    """A parameter of another dtype than the tensor that feeds it: allowed, only where nothing is lost, or refused."""
    trace_file: str
    """A file to write this worker's part of the timelines to."""


class NextSync(NamedTuple):
    """What the sender has opened: a sync of `version`, of the `names` by metadata index; empty: all."""

    version: int
    names: tuple[int, ...]


class FleetMessage(NamedTuple):
    """Free text between the programs on top of a fleet: `body`, under a `topic`, of `sender` ("trainer 0", "worker 3")."""

    sender: str
    topic: str
    body: str


class Trainer:
    """One training process's side: rank 0 is the sender, which drives the syncs.

    Made, it has its transport up and can allocate; init() joins the fleet. A context manager: it shuts down, and when its
    body raised tells the fleet why. One call at a time; Ctrl-C ends every wait, and fails a sync under way everywhere.
    """

    def __init__(self, **options: Unpack[TrainerOptions]) -> None:
        self._source: WeightSource | None = None
        self._native = _native.Trainer(dict(options))
        self._close = weakref.finalize(self, self._native.shutdown, "the trainer has finished", None)

    def init(self, source: WeightSource) -> None:
        """Joins the fleet, holding `source`. A collective; on the sender it waits for every worker, connect_timeout_ms at most."""
        if not isinstance(source, WeightSource):
            raise InvalidTypeError(f"source must be a WeightSource, not {type(source).__name__}")
        self._source = source
        self._native.init(source)

    def send_weights(self, version: int, names: Sequence[str] | None = None) -> _native.SyncReport:
        """One sync, on every rank with the same version and names; returns when every live worker has committed.

        `names` are glob patterns of checkpoint names ("model.layers.0.*"); none: all. What fails it is raised, and the next
        call may succeed.
        """
        return self._native.send_weights(version, names)

    def next_sync(self) -> NextSync:
        """Not on the sender: waits for the sync that it opens next."""
        return NextSync(*self._native.next_sync())

    def returned(self) -> bool:
        """Whether init() has joined a fleet that ran already: follow its sender by next_sync()."""
        return self._native.returned()

    def allocate(self, bytes: int, what: str = "weights") -> memoryview:
        """Memory that peers can reach, as writable bytes (``numpy.frombuffer``, ``torch.frombuffer``)."""
        return self._native.allocate(bytes, what)

    def worker_init_payload(self) -> bytes:
        """What a worker is sent as it joins, made anew at any time after init()."""
        return self._native.worker_init_payload()

    def send_message(self, to: str, topic: str, body: str) -> None:
        """To "worker N" or "trainer N"; at most 1 MiB."""
        self._native.send_message(to, topic, body)

    def receive_message(self, timeout_ms: int) -> FleetMessage | None:
        """The next message, or None after `timeout_ms`. Raises once for each member that is lost.

        Of messages that nobody receives the newest 262,144 are kept, or 256 MiB of them; where older ones were dropped,
        ResourceExhaustedError says once how many.
        """
        message = self._native.receive_message(timeout_ms)
        return None if message is None else FleetMessage(*message)

    def engine_bytes(self) -> int:
        """Most bytes that the engine itself holds."""
        return self._native.engine_bytes()

    def shutdown(self, reason: str = "the trainer has finished", why: str | None = None) -> None:
        """Ends the fleet (sender) or this rank. `why`: an error that the others are to raise. Ends a call of another thread."""
        self._native.shutdown(reason, why)
        self._close.detach()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown(why=None if error is None else f"{type(error).__name__}: {error}")


class Worker:
    """One inference process's side: made, it has joined the fleet, baked and planned; serve() runs the syncs.

    It holds `model`, whose memory syncs land in until shutdown(). A context manager. One call at a time; Ctrl-C ends every wait.
    """

    def __init__(self, model: Model, **options: Unpack[WorkerOptions]) -> None:
        if not isinstance(model, Model):
            raise InvalidTypeError(f"model must be a Model, not {type(model).__name__}")
        self._model = model
        self._native = _native.Worker(model._native, dict(options))
        self._close = weakref.finalize(self, self._native.shutdown)

    @property
    def model(self) -> Model:
        """The model that it holds."""
        return self._model

    def serve(self, on_sync: Callable[[int, Error | None, _native.WorkerReport], object] | None = None) -> None:
        """Runs syncs as the sender starts them, until the fleet ends; the loss of the sender is raised.

        `on_sync(version, error, report)` is called after each, on this thread: the parameters are `version`'s when `error` is
        None. The next sync starts when it has returned. What it raises ends serve(), which may be called again.
        """
        self._native.serve(on_sync)

    def version(self) -> int:
        """The version the parameters hold; raises, listing the modules, where they are mixed."""
        return self._native.version()

    def module_version(self, module: str) -> int:
        """The version that one module holds: after a sync of some names another than version()."""
        return self._native.module_version(module)

    def version_guard(self) -> int:
        """A sequence lock over the parameters: odd while they are between versions."""
        return self._native.version_guard()

    def send_message(self, to: str, topic: str, body: str) -> None:
        """To "worker N" or "trainer N"; at most 1 MiB."""
        self._native.send_message(to, topic, body)

    def engine_bytes(self) -> int:
        """Most bytes that the engine holds beyond the parameters."""
        return self._native.engine_bytes()

    def plan_summary(self) -> str:
        """The plan, printed."""
        return self._native.plan_summary()

    def shutdown(self) -> None:
        """Leaves the fleet. Ends serve() of another thread, which returns; within on_sync, when that has returned."""
        self._native.shutdown()
        self._close.detach()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()


def allocate(bytes: int, what: str = "parameters") -> memoryview:
    """Memory for parameters that last, as writable bytes: what lands in it meets no page fault."""
    return _native.allocate(bytes, what)

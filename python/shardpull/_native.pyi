from collections.abc import Callable, Sequence
from typing import Any

from ._errors import Error

class TensorView:
    def __init__(
        self,
        data: int,
        dtype: str,
        shape: Sequence[int],
        stride: Sequence[int],
        storage: int,
        storage_bytes: int,
        writable: bool,
        owner: object,
    ) -> None: ...
    @property
    def data(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def storage_bytes(self) -> int: ...
    @property
    def writable(self) -> bool: ...

class Model:
    def parameters(self) -> list[tuple[str, str, tuple[int, ...], tuple[int, ...]]]: ...
    def bind(self, name: str, tensor: object) -> None: ...
    def array(self, name: str, owner: object) -> Any: ...
    def memory(self, name: str, owner: object) -> memoryview: ...
    def materialise(self) -> None: ...
    def parameter_bytes(self) -> int: ...

class Handle:
    """A checkpoint tensor without bytes, and the operations on it so far."""

    def __init__(self, name: str, dtype: str, shape: Sequence[int]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def stride(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def chain(self) -> str: ...
    def is_contiguous(self) -> bool: ...
    def apply(self, method: str, arguments: tuple[Any, ...]) -> Handle | tuple[Handle, ...]: ...

class PhaseTime:
    """One phase of a process in one sync; times in nanoseconds."""

    @property
    def phase(self) -> str:
        """Its name: "transfer", "produce wait"."""
    @property
    def charged_ns(self) -> int:
        """These add up to the process's time."""
    @property
    def active_ns(self) -> int:
        """While it was under way at all, also beside others."""
    @property
    def count(self) -> int:
        """How often."""

class WorkerReport:
    """One worker's part of a finished sync; see include/shardpull/fleet.h."""

    @property
    def consumer(self) -> int:
        """The worker's number."""
    @property
    def bytes_kept(self) -> int:
        """Unique source bytes that it keeps of this sync's names, as they travel."""
    @property
    def bytes_moved(self) -> int:
        """By the transport's counters, headers apart."""
    @property
    def update_ns(self) -> int:
        """Duration of its update."""
    @property
    def copy_ns(self) -> int:
        """Of it, time in which bytes moved."""
    @property
    def padding_bytes(self) -> int:
        """Of `bytes_moved`, the gaps between the keys of packed chunks."""
    @property
    def rerouted_pulls(self) -> int:
        """Pulls that another rank than the plan's served."""
    @property
    def fallback_names(self) -> int:
        """Names that did not bake: pulled whole and loaded by the model's own loaders."""
    @property
    def commit_ns(self) -> int:
        """Duration of its commit."""
    @property
    def phases(self) -> list[PhaseTime]:
        """By priority, each at most once; what is charged adds up to `update_ns` + `commit_ns`."""
    @property
    def waited_for(self) -> int:
        """The rank that most of the waiting was for; meaningless when `waited_ns` is 0."""
    @property
    def waited_ns(self) -> int:
        """How long for that one."""

class RankReport:
    """One rank's part of a finished sync."""

    @property
    def rank(self) -> int:
        """The trainer's."""
    @property
    def export_ns(self) -> int:
        """Time spent copying small tensors into export buffers."""
    @property
    def export_bytes(self) -> int:
        """That it copied there."""
    @property
    def peak_resident_bytes(self) -> int:
        """Most bytes of gathered groups held at once; of a resident rank everything it published."""
    @property
    def packs(self) -> int:
        """Pulls packed into serve slots in this sync."""
    @property
    def packed_bytes(self) -> int:
        """Of those."""
    @property
    def wall_ns(self) -> int:
        """From when it learnt of the sync to when all its groups were freed."""
    @property
    def phases(self) -> list[PhaseTime]:
        """By priority, each at most once; what is charged adds up to `wall_ns`."""

class SyncReport:
    """A finished sync as the sender sees it; str() is its summary line."""

    @property
    def sync_id(self) -> int:
        """The sender's number, never reused in a fleet's life."""
    @property
    def version(self) -> int:
        """The caller's."""
    @property
    def wall_ns(self) -> int:
        """From the call of send_weights to the last commit."""
    @property
    def workers(self) -> list[WorkerReport]:
        """In the sender's report only."""
    @property
    def ranks(self) -> list[RankReport]:
        """All ranks on the sender, itself elsewhere."""
    @property
    def lost_consumers(self) -> list[int]:
        """Workers whose processes were lost in this sync."""
    @property
    def dropped_consumers(self) -> list[int]:
        """Their living mates, which left the sync with them."""
    @property
    def lost_ranks(self) -> list[int]:
        """Trainers that were lost; others served what they would have."""

class SyncRequest:
    """What one sync asks of a source."""

    @property
    def sync_id(self) -> int:
        """The sender's number."""
    @property
    def version(self) -> int:
        """What send_weights was called with."""
    @property
    def groups(self) -> list[int]:
        """To yield, ascending."""
    @property
    def names(self) -> list[int]:
        """That need views, ascending; empty: all."""

class Trainer:
    def __init__(self, options: dict[str, object]) -> None: ...
    def init(self, source: object) -> None: ...
    def returned(self) -> bool: ...
    def worker_init_payload(self) -> bytes: ...
    def send_weights(self, version: int, names: Sequence[str] | None) -> SyncReport: ...
    def next_sync(self) -> tuple[int, tuple[int, ...]]: ...
    def allocate(self, bytes: int, what: str) -> memoryview: ...
    def send_message(self, to: str, topic: str, body: str) -> None: ...
    def receive_message(self, timeout_ms: int) -> tuple[str, str, str] | None: ...
    def engine_bytes(self) -> int: ...
    def shutdown(self, reason: str, why: str | None) -> None: ...

class Worker:
    def __init__(self, model: Model, options: dict[str, object]) -> None: ...
    def serve(self, on_sync: Callable[[int, Error | None, WorkerReport], object] | None) -> None: ...
    def version(self) -> int: ...
    def module_version(self, module: str) -> int: ...
    def version_guard(self) -> int: ...
    def engine_bytes(self) -> int: ...
    def plan_summary(self) -> str: ...
    def send_message(self, to: str, topic: str, body: str) -> None: ...
    def shutdown(self) -> None: ...

def adopt(tensor: object, what: str) -> TensorView: ...
def model_of_recording(text: bytes, metadata: Sequence[object], origin: str) -> Model: ...
def model_of_family(config: object, consumer: int, layout: dict[str, int]) -> Model: ...
def model_of_tensors(tensors: dict[str, object]) -> Model: ...
def gather_groups(metadata: Sequence[object]) -> list[tuple[int, int]]: ...
def allocate(bytes: int, what: str) -> memoryview: ...
def model_of_loaders(
    load: Callable[[Sequence[tuple[str, Handle]]], object], explain: Callable[[str], str], modules: Sequence[object]
) -> Model: ...
def add_alias(model: Model, module: str, name: str, target: int, shape: tuple[int, ...]) -> None: ...
def add_module_alias(model: Model, path: str, target: str) -> None: ...
def record_copy(
    model: Model, target: int, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], source: Handle
) -> None: ...
def record_zero(model: Model, target: int, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> None: ...
def record(model: Model, metadata: Sequence[object], conversions: str, header: object) -> bytes: ...

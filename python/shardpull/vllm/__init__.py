"""shardpull for vLLM: the weight-transfer backend "shardpull" of its workers, and the trainer's side of it.

vLLM finds the backend by the package's entry point; an engine is started with ``WeightTransferConfig(backend="shardpull")``.
The trainer's side needs no vLLM. Tried with 0.32.0, its build for CPUs.
"""

from ._clients import Client, HTTPClient, OfflineClient
from ._trainer import Trainer

__all__ = ["Client", "HTTPClient", "OfflineClient", "Trainer", "register"]


def register() -> None:
    """Makes the backend known to this process. vLLM calls it, by the entry point, in each of its own."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "shardpull" not in WeightTransferEngineFactory._registry:  # it may be called more than once
        WeightTransferEngineFactory.register_engine("shardpull", "shardpull.vllm._engine", "ShardpullEngine")

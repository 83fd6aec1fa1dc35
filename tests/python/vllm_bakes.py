"""Bakes vLLM's own model classes, as one rank of an inference engine: a program that reads jobs and writes recordings, as JSON lines.

A job: config (path of a config.json), names ([name, dtype, shape] in the source's order), tp, pp, ep (a bool), dtype. All jobs
of a process have one tp and pp, and its rank.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile


def engine_config(config, folder, *, tp=1, pp=1, ep=False, dtype="bfloat16", **more):
    """vLLM's configuration of an engine over `config`, without weights or tokenizer."""
    from vllm.engine.arg_utils import EngineArgs

    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=256, tensor_parallel_size=tp,
        pipeline_parallel_size=pp, enable_expert_parallel=ep, **more,
    ).create_engine_config()  # fmt: skip


def main():
    rank, port, jobs = int(sys.argv[1]), sys.argv[2], json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries say goes elsewhere
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_DIST_IDENT=port)

    import shardpull
    import torch
    from shardpull.modules import ModuleModel
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized
    from vllm.model_executor.model_loader.utils import initialize_model

    for job in jobs:
        folder = tempfile.mkdtemp(prefix="shardpull-vllm-")
        world = job["tp"] * job["pp"]
        with open(job["config"]) as file:
            config = json.load(file)
        more = {"runner": "pooling"} if config["architectures"][0].startswith("Bert") else {}
        settings = engine_config(config, folder, tp=job["tp"], pp=job["pp"], ep=job["ep"], dtype=job["dtype"], **more)
        settings.parallel_config.rank = rank
        try:
            with set_current_vllm_config(settings):
                init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
                ensure_model_parallel_initialized(job["tp"], job["pp"])
                torch.set_default_dtype(settings.model_config.dtype)
                model = ModuleModel(initialize_model(settings))
                metadata = [shardpull.TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in job["names"]]
                answer = {"recording": model.record(metadata, worker=rank).decode()}
        except Exception as error:  # noqa: BLE001  (told to the test)
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        os.write(out, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()

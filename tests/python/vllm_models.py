"""Tiny models that vLLM's CPU build runs: configurations, and checkpoints of any version of their weights.

One for each way in which loading differs: fused and split projections, tied and untied embeddings, biases, experts one by one
and stacked, latent attention, recurrent layers, parameters in another dtype than the checkpoint's.
"""

import json
import pathlib
import zlib

import torch
from safetensors.torch import save_file

VOCABULARY = 1000  # no multiple of 64: vLLM pads it
HIDDEN = 64

COMMON = {
    "dtype": "bfloat16", "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "hidden_act": "silu", "use_cache": True,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "qk_head_dim": 96, "v_head_dim": 32, "first_k_dense_replace": 1, "moe_intermediate_size": 64,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    "intermediate_size": 128,
}  # fmt: skip

CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 128, **ATTENTION},
    "llama_tied": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 128, **ATTENTION, "tie_word_embeddings": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 128, **ATTENTION},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 128, **ATTENTION, "mlp_only_layers": [0],
        "decoder_sparse_step": 1, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "intermediate_size": 64, **ATTENTION,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", **LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **LATENT, "q_lora_rank": 48, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "intermediate_size": 128, **ATTENTION, "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 32, "sliding_window": 64, "sliding_window_pattern": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "intermediate_size": 128, **ATTENTION, "attention_bias": True,
        "use_qk_norm": True, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_routed_experts": 8,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5},
    },
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "original_max_position_embeddings": 512},
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "intermediate_size": 128, **ATTENTION, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25},
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": 64, **ATTENTION, "attention_bias": True,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
        "swiglu_limit": 7.0, "swiglu_alpha": 1.702,
        "rope_parameters": {
            "rope_theta": 150000.0, "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 128, "truncate": False,
        },
    },
}  # fmt: skip


def config_of(model: str) -> dict:
    return {**COMMON, **CONFIGS[model]}


def _attention(config, prefix):
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", HIDDEN // heads)
    gate = 2 if config["model_type"] == "qwen3_next" else 1  # its query projection has a gate for each head
    if config["model_type"] == "phi3":
        yield f"{prefix}.qkv_proj.weight", ((heads + 2 * kv) * head, HIDDEN)
    else:
        biased = config.get("attention_bias") or config["model_type"] == "qwen2"
        for name, rows in (("q_proj", gate * heads * head), ("k_proj", kv * head), ("v_proj", kv * head)):
            yield f"{prefix}.{name}.weight", (rows, HIDDEN)
            if biased:
                yield f"{prefix}.{name}.bias", (rows,)
    yield f"{prefix}.o_proj.weight", (HIDDEN, heads * head)
    if config["model_type"] == "gpt_oss":
        yield f"{prefix}.o_proj.bias", (HIDDEN,)
        yield f"{prefix}.sinks", (heads,)
    if config["model_type"] in ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text") or config.get("use_qk_norm"):
        yield f"{prefix}.q_norm.weight", (head,)
        yield f"{prefix}.k_norm.weight", (head,)


def _latent_attention(config, prefix):
    heads, rank, rope, nope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    if config["q_lora_rank"] is None:
        yield f"{prefix}.q_proj.weight", (heads * (nope + rope), HIDDEN)
    else:
        yield f"{prefix}.q_a_proj.weight", (config["q_lora_rank"], HIDDEN)
        yield f"{prefix}.q_a_layernorm.weight", (config["q_lora_rank"],)
        yield f"{prefix}.q_b_proj.weight", (heads * (nope + rope), config["q_lora_rank"])
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (rank + rope, HIDDEN)
    yield f"{prefix}.kv_a_layernorm.weight", (rank,)
    yield f"{prefix}.kv_b_proj.weight", (heads * (nope + config["v_head_dim"]), rank)
    yield f"{prefix}.o_proj.weight", (HIDDEN, heads * config["v_head_dim"])


def _recurrent(config, prefix):
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    yield f"{prefix}.in_proj_qkvz.weight", (2 * keys + 2 * values, HIDDEN)
    yield f"{prefix}.in_proj_ba.weight", (2 * config["linear_num_value_heads"], HIDDEN)
    yield f"{prefix}.conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield f"{prefix}.A_log", (config["linear_num_value_heads"],)
    yield f"{prefix}.dt_bias", (config["linear_num_value_heads"],)
    yield f"{prefix}.norm.weight", (config["linear_value_head_dim"],)
    yield f"{prefix}.out_proj.weight", (HIDDEN, values)


def _dense(prefix, size, fused=False):
    if fused:
        yield f"{prefix}.gate_up_proj.weight", (2 * size, HIDDEN)
    else:
        yield f"{prefix}.gate_proj.weight", (size, HIDDEN)
        yield f"{prefix}.up_proj.weight", (size, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, size)


def _feed_forward(config, layer, prefix):
    kind = config["model_type"]
    if kind == "mixtral":
        yield f"{prefix}.block_sparse_moe.gate.weight", (config["num_local_experts"], HIDDEN)
        for expert in range(config["num_local_experts"]):
            for name, shape in (("w1", (64, HIDDEN)), ("w2", (HIDDEN, 64)), ("w3", (64, HIDDEN))):
                yield f"{prefix}.block_sparse_moe.experts.{expert}.{name}.weight", shape
    elif kind == "gpt_oss":
        experts, size = config["num_local_experts"], config["intermediate_size"]
        yield f"{prefix}.mlp.router.weight", (experts, HIDDEN)
        yield f"{prefix}.mlp.router.bias", (experts,)
        yield f"{prefix}.mlp.experts.gate_up_proj", (experts, HIDDEN, 2 * size)
        yield f"{prefix}.mlp.experts.gate_up_proj_bias", (experts, 2 * size)
        yield f"{prefix}.mlp.experts.down_proj", (experts, size, HIDDEN)
        yield f"{prefix}.mlp.experts.down_proj_bias", (experts, HIDDEN)
    elif "moe_intermediate_size" not in config or layer in config.get("mlp_only_layers", []) or layer < config.get("first_k_dense_replace", 0):
        yield from _dense(f"{prefix}.mlp", config["intermediate_size"], fused=kind == "phi3")
    else:
        experts, size = config.get("n_routed_experts") or config["num_experts"], config["moe_intermediate_size"]
        yield f"{prefix}.mlp.gate.weight", (experts, HIDDEN)
        if kind in ("deepseek_v3", "glm4_moe"):
            yield f"{prefix}.mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from _dense(f"{prefix}.mlp.experts.{expert}", size)
        if config.get("n_shared_experts"):
            yield from _dense(f"{prefix}.mlp.shared_experts", size * config["n_shared_experts"])
        if kind == "qwen3_next":
            yield from _dense(f"{prefix}.mlp.shared_expert", config["shared_expert_intermediate_size"])
            yield f"{prefix}.mlp.shared_expert_gate.weight", (1, HIDDEN)


def tensors_of(model: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in its order."""
    config = config_of(model)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config["model_type"] == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes |= {f"{prefix}.{norm}.weight": (HIDDEN,) for norm in norms}
        if config.get("layer_types", ["full_attention"] * 8)[layer] == "linear_attention":
            shapes |= dict(_recurrent(config, f"{prefix}.linear_attn"))
        elif "kv_lora_rank" in config:
            shapes |= dict(_latent_attention(config, f"{prefix}.self_attn"))
        else:
            shapes |= dict(_attention(config, f"{prefix}.self_attn"))
        shapes |= dict(_feed_forward(config, layer, prefix))
    shapes["model.norm.weight"] = (HIDDEN,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    return shapes


def weights_of(model: str, version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """All tensors of one version; no two versions have an element in common but by chance, and every tensor matters to the output."""
    weights = {}
    for name, shape in tensors_of(model).items():
        random = torch.Generator().manual_seed(zlib.crc32(f"{name} {version}".encode()))
        values = torch.randn(shape, generator=random)
        if len(shape) > 1 and not name.endswith("_bias"):
            values /= (shape[1] if ".experts." in name and len(shape) == 3 else shape[-1]) ** 0.5
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                values *= shape[-1] ** 0.5 / 2
        elif "norm" in name:
            values = 1 + values / 8
        else:
            values /= 2
        weights[name] = values.to(dtype)
    return weights


def write(model: str, directory: str | pathlib.Path, weights: dict[str, torch.Tensor]) -> str:
    """A checkpoint that vLLM starts from."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(model)))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)

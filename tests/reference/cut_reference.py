#!/usr/bin/env python3
"""Says whether a dumped worker holds exactly what it should, using nothing of shardpull.

Reads a Hugging Face checkpoint directory with a safetensors parser of its own, brings every tensor to the asked version,
cuts what one vLLM-style worker keeps with plain numpy slices, and compares with the dump byte by byte. Slow and simple on
purpose: where this script and the library differ, one of them is wrong.

    cut_reference.py MODEL_DIR --inference tp=2,pp=1 --worker 1 --version 3 --dump worker-1.safetensors

Exit status: 0 equal, 1 different (the first difference is printed), 2 wrong use or an unreadable input.

The version of a tensor (docs/FORMATS.md, "Mutation"): its little-endian 8-byte words, the last one cut, each XORed with
output number i + 1 of SplitMix64 seeded with the version, i being the word's index; version 0 is the checkpoint.
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np

# Raw element types: bits are compared, never values.
WIDTH = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}
RAW = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
TORCH = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}


class Unusable(Exception):
    """An input that cannot be judged."""


class Array:
    """A tensor as its raw bits (numpy array of unsigned integers) and its dtype's name."""

    def __init__(self, dtype, bits):
        self.dtype = dtype
        self.bits = bits


class SafetensorsFile:
    def __init__(self, path):
        self.path = path
        with open(path, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length).decode("utf-8"))
        self.metadata = header.pop("__metadata__", {})
        self.header = header
        self.start = 8 + length
        size = path.stat().st_size - self.start
        self.data = np.memmap(path, dtype="u1", mode="r", offset=self.start) if size > 0 else np.zeros(0, "u1")

    def read(self, name):
        entry = self.header[name]
        begin, end = entry["data_offsets"]
        raw = np.array(self.data[begin:end])  # a copy: aligned, and ours
        return Array(entry["dtype"], raw.view(RAW[WIDTH[entry["dtype"]]]).reshape(entry["shape"]))


class Checkpoint:
    def __init__(self, directory, version):
        self.version = version
        index = directory / "model.safetensors.index.json"
        self.where = {}
        if index.exists():
            weight_map = json.loads(index.read_text())["weight_map"]
            files = {name: SafetensorsFile(directory / name) for name in sorted(set(weight_map.values()))}
            self.where = {name: files[file] for name, file in weight_map.items()}
        else:
            for path in sorted(directory.glob("*.safetensors")):
                if path.name.startswith("consolidated"):
                    continue
                file = SafetensorsFile(path)
                for name in file.header:
                    if name in self.where:
                        raise Unusable(f"{name} is in two files, and there is no index")
                    self.where[name] = file

    def __contains__(self, name):
        return name in self.where

    def shape(self, name):
        return list(self.where[name].header[name]["shape"])

    def read(self, name):
        if name not in self.where:
            raise Unusable(f"the checkpoint has no tensor {name}")
        tensor = self.where[name].read(name)
        flat = tensor.bits.reshape(-1).view("u1")
        mutate(flat, self.version)
        return Array(tensor.dtype, flat.view(tensor.bits.dtype).reshape(tensor.bits.shape))


def splitmix64(version, first, count):
    """Outputs first + 1 .. first + count of SplitMix64 seeded with `version`."""
    with np.errstate(over="ignore"):
        z = np.uint64(version) + (np.arange(first, first + count, dtype="u8") + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))).astype("<u8")


def mutate(flat, version, block=1 << 20):
    """Brings the bytes of a tensor (1-d, u1, contiguous) from version 0 to `version`, in place."""
    if version == 0:
        return
    whole = flat.size // 8
    words = flat[: whole * 8].view("<u8")
    for at in range(0, whole, block):
        count = min(block, whole - at)
        words[at : at + count] ^= splitmix64(version, at, count)
    rest = flat.size - whole * 8
    if rest:
        flat[whole * 8 :] ^= splitmix64(version, whole, 1).view("u1")[:rest]


def convert(tensor, dtype):
    """To a parameter's dtype, as PyTorch rounds."""
    if tensor.dtype == dtype:
        return tensor
    if (tensor.dtype, dtype) == ("F32", "BF16"):
        bits = tensor.bits.astype("u8")
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return Array(dtype, np.where(nan, 0x7FC0, rounded).astype("<u2"))
    if (tensor.dtype, dtype) == ("BF16", "F32"):
        return Array(dtype, (tensor.bits.astype("<u4") << 16).astype("<u4"))
    raise Unusable(f"this script does not convert {tensor.dtype} to {dtype}")


# --- cuts ---


def rows(bits, part, parts, what):
    """Part `part` of `parts` equal runs of rows."""
    if bits.shape[0] % parts:
        raise Unusable(f"{what}: {bits.shape[0]} rows do not divide by {parts}")
    step = bits.shape[0] // parts
    return bits[part * step : (part + 1) * step]


def columns(bits, part, parts, what):
    return rows(bits.T, part, parts, what).T


def head_rows(bits, heads, rank, tp, what):
    """The rows of this rank's heads; with fewer heads than ranks, tp / heads ranks in a row share one."""
    if heads >= tp:
        if heads % tp:
            raise Unusable(f"{what}: {heads} heads on {tp} ranks")
        return rows(bits, rank, tp, what)
    if tp % heads:
        raise Unusable(f"{what}: {heads} heads on {tp} ranks")
    return rows(bits, rank // (tp // heads), heads, what)


def vocabulary_rows(bits, rank, tp, what):
    """Rows padded with zeros to a multiple of 64, then cut evenly."""
    padded = (bits.shape[0] + 63) // 64 * 64
    full = np.zeros((padded, *bits.shape[1:]), bits.dtype)
    full[: bits.shape[0]] = bits
    return rows(full, rank, tp, what)


def stage_layers(layers, stage, stages):
    """vLLM's cut: equal, the remainder one each to the stages before the last, from the back."""
    counts = [layers // stages] * stages
    for i in range(2, layers % stages + 2):
        counts[-i] += 1
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def expert_block(experts, rank, ranks):
    """Whole experts, dealt out in blocks; the first ranks get one more while some are left over."""
    counts = [experts // ranks + (1 if r < experts % ranks else 0) for r in range(ranks)]
    if 0 in counts:
        raise Unusable(f"{experts} experts on {ranks} ranks")
    first = sum(counts[:rank])
    return range(first, first + counts[rank])


# --- what a worker holds: name -> Array ---


class Worker:
    def __init__(self, config, checkpoint, layout, worker, dtype):
        text = config.get("text_config") or {}
        self.config = {**config, **{k: v for k, v in text.items() if v is not None}}
        self.tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)) or False
        self.checkpoint = checkpoint
        self.tp, self.pp = layout["tp"], layout["pp"]
        # Numbered replica, data-parallel rank, stage, tensor-parallel rank, the last one fastest.
        self.rank = worker % self.tp
        self.stage = worker // self.tp % self.pp
        # Experts are spread over all ranks of a stage, or over none.
        self.ep = layout["ep"]
        self.ep_rank = worker // (self.tp * self.pp) % layout["dp"] * self.tp + self.rank if self.ep > 1 else 0
        named = [part.get(key) for part in (config, text) for key in ("dtype", "torch_dtype")]
        named = [name for name in named if name not in (None, "auto")] or ["float32"]
        self.dtype = dtype or TORCH.get(named[0].removeprefix("torch."))
        if self.dtype is None:
            raise Unusable("config.json has a dtype this script does not know; give --dtype")
        self.out = {}
        # A tied head may have storage of its own; then it holds the embedding's rows.
        self.optional = {}

    def get(self, key, default=None):
        value = self.config.get(key)
        return default if value is None else value

    def put(self, name, bits_and_dtype):
        self.out[name] = bits_and_dtype

    def source(self, name):
        tensor = self.checkpoint.read(name)
        return convert(tensor, self.dtype)

    def cut(self, source, how):
        tensor = self.source(source)
        return Array(tensor.dtype, np.ascontiguousarray(how(tensor.bits, source)))

    def join(self, parts):
        return Array(parts[0].dtype, np.concatenate([part.bits for part in parts]))

    # The ways a linear layer is cut.
    def whole(self, bits, what):
        return bits

    def even_rows(self, bits, what):
        return rows(bits, self.rank, self.tp, what)

    def vocabulary(self, bits, what):
        return vocabulary_rows(bits, self.rank, self.tp, what)

    def heads(self, count):
        return lambda bits, what: head_rows(bits, count, self.rank, self.tp, what)

    def even_columns(self, bits, what):
        return columns(bits, self.rank, self.tp, what)

    def kv_heads(self, layer):
        value = self.get("num_key_value_heads", self.config["num_attention_heads"])
        return value[layer] if isinstance(value, list) else value

    def head_dim(self):
        default = 128 if self.get("model_type") == "qwen3" else self.config["hidden_size"] // self.config["num_attention_heads"]
        return self.get("head_dim", default)

    def attention(self, target, sources, fused, layer):
        """A fused query, key and value projection, from three tensors or from one that is fused on disk."""
        q, kv = self.config["num_attention_heads"], self.kv_heads(layer)
        counts = [q, kv, kv]
        for kind in ("weight", "bias"):
            if f"{fused}.{kind}" in self.checkpoint:
                tensor = self.source(f"{fused}.{kind}")
                ends = np.cumsum([count * self.head_dim() for count in counts])
                if ends[-1] != tensor.bits.shape[0]:
                    raise Unusable(f"{fused}.{kind} has {tensor.bits.shape[0]} rows, the config implies {ends[-1]}")
                parts = np.split(tensor.bits, ends[:-1])
                self.put(f"{target}.{kind}", Array(tensor.dtype, np.concatenate(
                    [self.heads(count)(part, fused) for count, part in zip(counts, parts)])))
            elif f"{sources[0]}.{kind}" in self.checkpoint:
                for source, count in zip(sources, counts):
                    if self.checkpoint.shape(f"{source}.{kind}")[0] != count * self.head_dim():
                        raise Unusable(f"{source}.{kind}: the config implies {count} heads of {self.head_dim()}")
                self.put(f"{target}.{kind}", self.join(
                    [self.cut(f"{source}.{kind}", self.heads(count)) for source, count in zip(sources, counts)]))

    def linear(self, target, source, weight, bias):
        self.put(f"{target}.weight", self.cut(f"{source}.weight", weight))
        if f"{source}.bias" in self.checkpoint:
            self.put(f"{target}.bias", self.cut(f"{source}.bias", bias))

    def feed_forward(self, s, t):
        """A gated network under the names s + gate_proj and so on; gate and up may be fused on disk."""
        for kind in ("weight", "bias"):
            fused = f"{s}gate_up_proj.{kind}"
            if fused in self.checkpoint:
                tensor = self.source(fused)
                gate, up = np.split(tensor.bits, 2)
                self.put(f"{t}gate_up_proj.{kind}", Array(tensor.dtype, np.concatenate(
                    [self.even_rows(gate, fused), self.even_rows(up, fused)])))
            elif f"{s}gate_proj.{kind}" in self.checkpoint:
                self.put(f"{t}gate_up_proj.{kind}", self.join(
                    [self.cut(f"{s}{x}_proj.{kind}", self.even_rows) for x in ("gate", "up")]))
        self.linear(t + "down_proj", s + "down_proj", self.even_columns, self.whole)

    def experts_of_layer(self, s):
        """(gate, up, down) of every expert, [I, H] and [H, I], from one tensor each or from stacks of all."""
        count, hidden = self.expert_count(), self.config["hidden_size"]
        width = self.config["moe_intermediate_size"]

        def each(shards, rows_of_all, stack, columns):
            """Per expert the tensors `shards`; `stack` holds them one below the other, maybe transposed."""
            if s + stack not in self.checkpoint:
                return [[self.source(f"{s}{e}.{x}.weight").bits for x in shards] for e in range(count)]
            bits = self.source(s + stack).bits
            if "Qwen3VLMoeForConditionalGeneration" in self.config["architectures"]:  # has had both orders
                if rows_of_all == columns:
                    raise Unusable(f"{s}{stack} is square: its order cannot be told")
                if list(bits.shape[1:]) == [columns, rows_of_all]:
                    bits = bits.transpose(0, 2, 1)
            if list(bits.shape) != [count, rows_of_all, columns]:
                raise Unusable(f"{s}{stack} has shape {list(bits.shape)}")
            return [np.split(bits[e], len(shards)) for e in range(count)]

        gate_up = each(["gate_proj", "up_proj"], 2 * width, "gate_up_proj", hidden)
        down = each(["down_proj"], hidden, "down_proj", width)
        return [(gate, up, d) for (gate, up), (d,) in zip(gate_up, down)]

    def expert_count(self):
        return next((self.get(x) for x in ("num_experts", "num_local_experts", "n_routed_experts") if self.get(x) is not None), 0)

    def experts(self, s, t):
        """w13 and w2 of the worker's experts: whole ones with expert parallelism, a part of each without."""
        everything = self.experts_of_layer(s + "mlp.experts.")
        w13, w2 = [], []
        for expert in expert_block(len(everything), self.ep_rank, self.ep):
            gate, up, down = everything[expert]
            if self.ep == 1:
                gate, up, down = self.even_rows(gate, s), self.even_rows(up, s), self.even_columns(down, s)
            w13.append(np.concatenate([gate, up]))
            w2.append(down)
        self.put(f"{t}mlp.experts.routed_experts.w13_weight", Array(self.dtype, np.stack(w13)))
        self.put(f"{t}mlp.experts.routed_experts.w2_weight", Array(self.dtype, np.stack(w2)))
        self.put(f"{t}mlp.gate.weight", self.cut(f"{s}mlp.gate.weight", self.whole))

    def deepseek(self):
        """Latent attention; dense layers first, then routed and shared experts. Layers past the last one are ignored."""
        heads, lora = self.config["num_attention_heads"], self.get("q_lora_rank")
        if heads % self.tp:
            raise Unusable(f"{heads} heads on {self.tp} ranks")
        if self.stage == 0 or (self.stage == self.pp - 1 and self.tied):
            self.put("model.embed_tokens.weight", self.cut("model.embed_tokens.weight", self.vocabulary))
        for layer in stage_layers(self.config["num_hidden_layers"], self.stage, self.pp):
            at = f"model.layers.{layer}."
            a = at + "self_attn."

            def same(name, how, a=a):
                self.put(f"{a}{name}.weight", self.cut(f"{a}{name}.weight", how))

            if lora is None:
                same("q_proj", self.even_rows)
                same("kv_a_proj_with_mqa", self.whole)
            else:
                self.put(a + "fused_qkv_a_proj.weight", self.join(
                    [self.cut(f"{a}{x}.weight", self.whole) for x in ("q_a_proj", "kv_a_proj_with_mqa")]))
                same("q_a_layernorm", self.whole)
                same("q_b_proj", self.even_rows)
            same("kv_a_layernorm", self.whole)
            same("kv_b_proj", self.even_rows)
            same("o_proj", self.even_columns)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.put(f"{at}{norm}.weight", self.cut(f"{at}{norm}.weight", self.whole))
            sparse = layer >= self.config["first_k_dense_replace"] and layer % self.get("moe_layer_freq", 1) == 0
            if not sparse:
                self.feed_forward(at + "mlp.", at + "mlp.")
                continue
            self.experts(at, at)
            bias = at + "mlp.gate.e_score_correction_bias"
            if bias in self.checkpoint:
                self.put(bias, convert(self.checkpoint.read(bias), "F32"))
            if self.get("n_shared_experts"):
                self.feed_forward(at + "mlp.shared_experts.", at + "mlp.shared_experts.")
        if self.stage == self.pp - 1:
            self.put("model.norm.weight", self.cut("model.norm.weight", self.whole))
            if self.tied:
                self.optional["lm_head.weight"] = self.out["model.embed_tokens.weight"]
            else:
                self.put("lm_head.weight", self.cut("lm_head.weight", self.vocabulary))

    def decoder(self):
        """llama, qwen2, qwen3 and its mixtures of experts; alone or as the language model of a multimodal checkpoint."""
        nested = "model.language_model.embed_tokens.weight" in self.checkpoint
        source, target = ("model.language_model.", "language_model.model.") if nested else ("model.", "model.")
        head = "language_model.lm_head.weight" if nested else "lm_head.weight"
        first, last = self.stage == 0, self.stage == self.pp - 1
        if first or (last and self.tied):
            self.put(target + "embed_tokens.weight", self.cut(source + "embed_tokens.weight", self.vocabulary))
        for layer in stage_layers(self.config["num_hidden_layers"], self.stage, self.pp):
            s, t = f"{source}layers.{layer}.", f"{target}layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
                if norm.startswith("self_attn") and f"{s}{norm}.weight" not in self.checkpoint:
                    continue
                self.put(f"{t}{norm}.weight", self.cut(f"{s}{norm}.weight", self.whole))
            self.attention(t + "self_attn.qkv_proj", [s + f"self_attn.{x}_proj" for x in "qkv"], s + "self_attn.qkv_proj", layer)
            self.linear(t + "self_attn.o_proj", s + "self_attn.o_proj", self.even_columns, self.whole)
            sparse = (self.expert_count() > 0 and layer not in self.get("mlp_only_layers", [])
                      and (layer + 1) % self.get("decoder_sparse_step", 1) == 0)
            if sparse and "moe" in self.get("model_type"):
                self.experts(s, t)
            else:
                self.feed_forward(s + "mlp.", t + "mlp.")
        if last:
            self.put(target + "norm.weight", self.cut(source + "norm.weight", self.whole))
            if self.tied:
                self.optional[head] = self.out[target + "embed_tokens.weight"]
            else:
                self.put(head, self.cut("lm_head.weight", self.vocabulary))

    def bert(self):
        if self.pp != 1:
            raise Unusable("this family has no pipeline stages")
        for name in ("word", "position", "token_type"):
            self.put(f"model.embeddings.{name}_embeddings.weight", self.cut(f"embeddings.{name}_embeddings.weight", self.vocabulary))
        self.linear("model.embeddings.LayerNorm", "embeddings.LayerNorm", self.whole, self.whole)
        positions = "embeddings.position_ids"
        if positions in self.checkpoint:
            self.put("model." + positions, self.checkpoint.read(positions))  # an index, never converted
        else:
            count = self.config["max_position_embeddings"]
            self.optional["model." + positions] = Array("I64", np.arange(count, dtype="<u8").reshape(1, count))
        heads = self.config["num_attention_heads"]
        for layer in range(self.config["num_hidden_layers"]):
            s, t = f"encoder.layer.{layer}.", f"model.encoder.layer.{layer}."
            self.attention(t + "attention.self.qkv_proj", [s + f"attention.self.{x}" for x in ("query", "key", "value")],
                           s + "attention.self.qkv_proj", layer)
            if heads % self.tp:
                raise Unusable(f"{heads} heads on {self.tp} ranks")
            self.linear(t + "attention.output.dense", s + "attention.output.dense", self.even_columns, self.whole)
            self.linear(t + "attention.output.LayerNorm", s + "attention.output.LayerNorm", self.whole, self.whole)
            self.linear(t + "intermediate.dense", s + "intermediate.dense", self.even_rows, self.even_rows)
            self.linear(t + "output.dense", s + "output.dense", self.even_columns, self.whole)
            self.linear(t + "output.LayerNorm", s + "output.LayerNorm", self.whole, self.whole)

    def build(self):
        kind = self.get("model_type")  # of the text part, where there is one
        family = {"bert": self.bert, "qwen3_moe": self.decoder, "qwen3_vl_moe_text": self.decoder}.get(kind)
        if "DeepseekV3ForCausalLM" in (self.config.get("architectures") or []):
            family = self.deepseek
        if family is None and any(str(kind).startswith(x) for x in ("llama", "mistral", "qwen2", "qwen3")) and "moe" not in str(kind):
            family = self.decoder
        if family is None:
            raise Unusable(f"this script does not know the model type {kind}")
        family()
        return self.out, self.optional


def first_difference(name, expected, found_dtype, found):
    """A sentence, or None."""
    if found_dtype != expected.dtype or list(found.shape) != list(expected.bits.shape):
        return f"{name}: {found_dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.bits.shape)}"
    a, b = np.ascontiguousarray(expected.bits).reshape(-1), np.ascontiguousarray(found).reshape(-1)
    if a.size == 0 or np.array_equal(a, b):
        return None
    wrong = np.flatnonzero(a != b)
    at = int(wrong[0])
    place = [int(x) for x in np.unravel_index(at, expected.bits.shape)] if expected.bits.shape else []
    return (f"{name}: element {place} is 0x{int(b[at]):0{2 * a.itemsize}x}, expected 0x{int(a[at]):0{2 * a.itemsize}x}; "
            f"{wrong.size} of {a.size} elements differ")


def compare(expected, optional, dump):
    """The first difference as a sentence, or None; and the bytes compared."""
    total = 0
    for name in expected:
        if name not in dump.header:
            return f"{name}: missing in the dump", total
    for name in sorted(dump.header):
        want = expected.get(name, optional.get(name))
        if want is None:
            return f"{name}: in the dump, but this worker holds no such parameter", total
        found = dump.read(name)
        problem = first_difference(name, want, found.dtype, found.bits)
        if problem:
            return problem, total
        total += found.bits.nbytes
    return None, total


def parse_layout(text):
    given = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in ("tp", "ep", "pp", "dp", "replicas") or not value.isdigit() or int(value) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}: give tp=2[,ep=1][,pp=1][,dp=1][,replicas=1]")
        given[key] = int(value)
    if "ep" in given and "tp" not in given and "dp" not in given:
        given["tp"] = given["ep"]
    layout = {"tp": 1, "ep": 1, "pp": 1, "dp": 1, "replicas": 1} | given
    if layout["ep"] not in (1, layout["tp"] * layout["dp"]):
        raise argparse.ArgumentTypeError(f"ep={layout['ep']} is neither 1 nor tp x dp")
    return layout


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path, metavar="MODEL_DIR")
    parser.add_argument("--inference", type=parse_layout, default=parse_layout("tp=1"), metavar="tp=2,pp=1")
    parser.add_argument("--worker", type=int, required=True, metavar="ID")
    parser.add_argument("--version", type=int, default=0, metavar="V")
    parser.add_argument("--dump", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--dtype", choices=sorted(TORCH), help="of the parameters; default: config.json's, or float32")
    args = parser.parse_args(argv)
    workers = args.inference["tp"] * args.inference["pp"] * args.inference["dp"] * args.inference["replicas"]
    if not 0 <= args.worker < workers:
        parser.error(f"--worker {args.worker}: the layout has workers 0 to {workers - 1}")
    if not 0 <= args.version < 1 << 64:
        parser.error(f"--version {args.version} does not fit 64 bits")
    try:
        config = json.loads((args.model / "config.json").read_text())
        checkpoint = Checkpoint(args.model, args.version)
        dump = SafetensorsFile(args.dump)
        expected, optional = Worker(config, checkpoint, args.inference, args.worker, TORCH.get(args.dtype)).build()
    except (Unusable, OSError, ValueError, KeyError, struct.error) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    problem, total = compare(expected, optional, dump)
    if problem:
        print(f"different: {problem}")
        return 1
    print(f"exact: {len(dump.header)} parameters, {total} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Checks the independent script itself: against the plans recorded from the real engine, and against cuts written out by hand.

Uses the standard library only; the script under test needs numpy, from the checkout's virtual environment when there is one.
"""

import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
SOURCE_DIR = HERE.parents[1]
ORACLES = SOURCE_DIR / "tests" / "oracles"
SCRIPT = HERE / "cut_reference.py"
VENV = SOURCE_DIR / ".venv" / "bin" / "python"
PYTHON = str(VENV) if VENV.exists() else sys.executable

NAMES = {"bfloat16": "BF16", "float32": "F32", "int64": "I64"}
SIZES = {"bfloat16": 2, "float32": 4, "int64": 8}
MASK = (1 << 64) - 1


def has_numpy():
    return subprocess.run([PYTHON, "-c", "import numpy"], capture_output=True).returncode == 0


def numel(shape):
    out = 1
    for dim in shape:
        out *= dim
    return out


def write_safetensors(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def position_coded(name, dtype, shape):
    """Bytes that no other tensor has. F32 values are BF16 values too, and no NaN: their conversion only drops bytes."""
    data = bytearray(random.Random(name).randbytes(numel(shape) * SIZES[dtype]))
    if dtype == "float32":
        data[0::4] = data[1::4] = bytes(len(data) // 4)
        data[3::4] = data[3::4].translate(bytes(x & 0xBF for x in range(256)))
    return bytes(data)


def mutated(data, version):
    """The documented mutation, word by word."""
    out = bytearray(data)
    for word in range((len(data) + 7) // 8):
        z = (version + (word + 1) * 0x9E3779B97F4A7C15) & MASK if version else 0
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        z ^= z >> 31
        for i in range(8 * word, min(8 * word + 8, len(out))):
            out[i] ^= (z >> (8 * (i - 8 * word))) & 0xFF
    return bytes(out)


def copy_rows(source, source_view, dst, dst_view, size):
    """Copies a region of at most 2 dims whose rows are contiguous on both sides."""
    shape = source_view["shape"]
    if numel(shape) == 0:
        return
    assert len(shape) < 3 and dst_view["shape"] == shape
    rows, columns = (1, numel(shape)) if len(shape) < 2 else (shape[0], numel(shape[1:]))
    for row in range(rows):
        a = (source_view["offset"] + row * (source_view["stride"][0] if len(shape) > 1 else 0)) * size
        b = (dst_view["offset"] + row * (dst_view["stride"][0] if len(shape) > 1 else 0)) * size
        dst[b : b + columns * size] = source[a : a + columns * size]


def engine_parameters(oracle, tensors):
    """What the recorded engine holds after the recorded copies; rows nothing feeds are zero."""
    shapes = {}
    for scatter in oracle["scatters"]:
        dst = scatter["dst"]
        name = f"{dst['module']}.{dst['param']}"
        if name in oracle["dst_params"]:
            shapes[name] = (oracle["dst_params"][name]["shape"], dst["dtype"])
        else:  # the recording leaves biases out: as long as what is copied into them
            end = max(dst["offset"] + numel(dst["shape"]), shapes.get(name, ([0], ""))[0][0])
            shapes[name] = ([end], dst["dtype"])
    # The wire's dtype; converted to the parameter's afterwards.
    wire = {f"{s['dst']['module']}.{s['dst']['param']}": s["dtype"] for s in oracle["scatters"]}
    memory = {name: bytearray(numel(shape) * SIZES[wire[name]]) for name, (shape, _) in shapes.items()}
    for scatter in oracle["scatters"]:
        name = f"{scatter['dst']['module']}.{scatter['dst']['param']}"
        copy_rows(tensors[scatter["name"]][2], scatter["src_view"], memory[name], scatter["dst"], SIZES[scatter["dtype"]])
    out = {}
    for name, (shape, dtype) in shapes.items():
        data = memory[name]
        if (wire[name], dtype) == ("float32", "bfloat16"):
            data, wide = bytearray(len(data) // 2), data
            data[0::2], data[1::2] = wide[2::4], wide[3::4]
        if (wire[name], dtype) == ("bfloat16", "float32"):
            data, narrow = bytearray(2 * len(data)), data
            data[2::4], data[3::4] = narrow[0::2], narrow[1::2]
        out[name] = (NAMES[dtype], shape, bytes(data))
    return out


@unittest.skipUnless(has_numpy(), "numpy is not installed")
class CutReference(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.model = pathlib.Path(temporary.name) / "model"
        self.dump = pathlib.Path(temporary.name) / "worker.safetensors"
        self.model.mkdir()

    def write_model(self, config, tensors):
        (self.model / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        write_safetensors(self.model / "model.safetensors", tensors)

    def run_script(self, inference, worker, *more):
        command = [PYTHON, str(SCRIPT), str(self.model), "--inference", inference, "--worker", str(worker), "--dump", str(self.dump)]
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def check(self, expected_code, inference, worker, *more):
        code, output = self.run_script(inference, worker, *more)
        self.assertEqual(code, expected_code, output)
        return output

    # --- against the recorded engine ---

    def oracle(self, name, config):
        oracle = json.loads((ORACLES / f"{name}.json").read_text())
        tensors = {
            n["name"]: (NAMES[n["dtype"]], n["shape"], position_coded(n["name"], n["dtype"], n["shape"])) for n in oracle["names"]
        }
        self.write_model((ORACLES / "configs" / f"{config}.json").read_text(), tensors)
        return oracle, tensors

    def test_equals_the_recorded_engine(self):
        cases = [
            ("llama", "llama", "tp=1", 0), ("llama.tp2.rank0", "llama", "tp=2", 0), ("llama.tp2.rank1", "llama", "tp=2", 1),
            ("qwen2", "qwen2", "tp=1", 0), ("qwen2_odd.tp2.rank0", "qwen2_odd", "tp=2", 0),
            ("qwen2_odd.tp2.rank1", "qwen2_odd", "tp=2", 1), ("qwen3", "qwen3", "tp=1", 0), ("qwen3.tp2.rank1", "qwen3", "tp=2,pp=1", 1),
            ("qwen3.pp2.rank0", "qwen3", "tp=1,pp=2", 0), ("qwen3.pp2.rank1", "qwen3", "tp=1,pp=2", 1),
            ("qwen3_12l", "qwen3_12l", "tp=1,dp=2,replicas=2", 3), ("qwen3_tied", "qwen3_tied", "tp=1", 0),
            ("qwen3_tied.pp2.rank0", "qwen3_tied", "pp=2", 0), ("qwen3_tied.pp2.rank1", "qwen3_tied", "pp=2", 1),
            ("qwen3_moe", "qwen3_moe", "tp=1,dp=2", 1), ("qwen3_moe.tp2.rank0", "qwen3_moe", "tp=2", 0),
            ("qwen3_moe.tp2.rank1", "qwen3_moe", "tp=2,replicas=2", 3), ("qwen3_moe_ep.tp2.rank0", "qwen3_moe", "tp=2,ep=2", 0),
            ("qwen3_moe_ep.tp2.rank1", "qwen3_moe", "ep=2", 1), ("deepseek_v3", "deepseek_v3", "tp=1", 0),
            ("deepseek_v3.tp2.rank0", "deepseek_v3", "tp=2", 0), ("deepseek_v3.tp2.rank1", "deepseek_v3", "tp=2", 1),
            ("deepseek_v3_ep.tp2.rank0", "deepseek_v3", "ep=2", 0), ("deepseek_v3_ep.tp2.rank1", "deepseek_v3", "tp=2,ep=2,pp=1", 1),
            ("bert_tiny", "bert_tiny", "tp=1", 0), ("bert_tiny.tp2.rank1", "bert_tiny", "tp=2", 1),
            ("bert_f32_relaxed.tp2.rank0", "bert", "tp=2", 0), ("bert_f32_relaxed.tp2.rank1", "bert", "tp=2", 1),
            ("bert_relaxed.tp2.rank1", "bert", "tp=2", 1),
        ]
        for name, config, inference, worker in cases:
            with self.subTest(name):
                oracle, tensors = self.oracle(name, config)
                parameters = engine_parameters(oracle, tensors)
                write_safetensors(self.dump, parameters)
                more = ["--dtype", "bfloat16"] if name.startswith("bert_relaxed") else []
                self.assertIn(f"exact: {len(parameters)} parameters", self.check(0, inference, worker, *more))

    def test_version_and_every_kind_of_difference(self):
        oracle, tensors = self.oracle("llama.tp2.rank1", "llama")
        for version in (1, 3, MASK):
            changed = {name: (dtype, shape, mutated(data, version)) for name, (dtype, shape, data) in tensors.items()}
            parameters = engine_parameters(oracle, changed)
            write_safetensors(self.dump, parameters)
            self.check(0, "tp=2", 1, "--version", str(version))
        self.assertIn("elements differ", self.check(1, "tp=2", 1, "--version", "2"))
        self.assertIn("different", self.check(1, "tp=2", 0, "--version", str(version)))

        name = "model.layers.1.self_attn.qkv_proj.weight"
        dtype, shape, data = parameters[name]
        flipped = bytearray(data)
        flipped[2 * (64 * 130 + 5)] ^= 1  # row 130, column 5
        write_safetensors(self.dump, {**parameters, name: (dtype, shape, bytes(flipped))})
        output = self.check(1, "tp=2", 1, "--version", str(version))
        self.assertIn(f"{name}: element [130, 5]", output)
        self.assertIn("1 of", output)
        write_safetensors(self.dump, {**parameters, name: (dtype, [shape[0] * shape[1]], data)})
        self.assertIn("expected BF16 [192, 64]", self.check(1, "tp=2", 1, "--version", str(version)))
        write_safetensors(self.dump, {**parameters, "extra": ("U8", [1], b"x")})
        self.assertIn("extra: in the dump", self.check(1, "tp=2", 1, "--version", str(version)))
        del parameters[name]
        write_safetensors(self.dump, parameters)
        self.assertIn("missing in the dump", self.check(1, "tp=2", 1, "--version", str(version)))

    def test_tied_head_may_have_storage_of_its_own(self):
        oracle, tensors = self.oracle("qwen3_tied", "qwen3_tied")
        parameters = engine_parameters(oracle, tensors)
        write_safetensors(self.dump, {**parameters, "lm_head.weight": parameters["model.embed_tokens.weight"]})
        self.check(0, "tp=1", 0)
        dtype, shape, data = parameters["model.embed_tokens.weight"]
        write_safetensors(self.dump, {**parameters, "lm_head.weight": (dtype, shape, bytes(len(data)))})
        self.assertIn("lm_head.weight", self.check(1, "tp=1", 0))

    def test_rounds_as_pytorch(self):
        # Halfway to even, up and down; the carry into the exponent; infinities; every kind of NaN.
        pairs = [(0x3F808000, 0x3F80), (0x3F818000, 0x3F82), (0x3F808001, 0x3F81), (0x7F7FFFFF, 0x7F80), (0xFF800000, 0xFF80),
                 (0x7F800001, 0x7FC0), (0xFFFFFFFF, 0x7FC0), (0x80000001, 0x8000)]
        oracle, tensors = self.oracle("bert_relaxed", "bert")
        name = "embeddings.LayerNorm.bias"
        values = [x for x, _ in pairs] + [0] * (384 - len(pairs))
        self.write_model((ORACLES / "configs" / "bert.json").read_text(), {**tensors, name: ("F32", [384], struct.pack("<384I", *values))})
        parameters = engine_parameters(oracle, tensors)
        parameters["model." + name] = ("BF16", [384], struct.pack("<384H", *[x for _, x in pairs], *[0] * (384 - len(pairs))))
        write_safetensors(self.dump, parameters)
        self.check(0, "tp=1", 0, "--dtype", "bfloat16")

    # --- by hand: what the recordings do not have ---

    def t0(self, vocab=100, fused=False, per_layer=False):
        """4 layers, hidden 64, 8 query heads, 2 KV heads of 8, feed-forward 96."""
        config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4,
                  "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": vocab,
                  "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
        shapes = {"model.embed_tokens.weight": [vocab, 64], "lm_head.weight": [vocab, 64], "model.norm.weight": [64]}
        for layer in range(4):
            at = f"model.layers.{layer}."
            if fused:
                shapes[at + "self_attn.qkv_proj.weight"] = [96, 64]
            else:
                shapes |= {at + "self_attn.q_proj.weight": [64, 64], at + "self_attn.k_proj.weight": [16, 64],
                           at + "self_attn.v_proj.weight": [16, 64]}
            shapes |= {at + "self_attn.o_proj.weight": [64, 64], at + "mlp.gate_proj.weight": [96, 64],
                       at + "mlp.up_proj.weight": [96, 64], at + "mlp.down_proj.weight": [64, 96],
                       at + "input_layernorm.weight": [64], at + "post_attention_layernorm.weight": [64]}
        tensors = {name: ("BF16", shape, position_coded(name, "bfloat16", shape)) for name, shape in shapes.items()}
        self.write_model(config, tensors)
        return tensors

    def t0_worker(self, tensors, tp, rank, layers, first, last, fused=False):
        """The same cuts, row ranges written out."""
        def take(name, begin, count):
            return tensors[name][2][begin * 128 : (begin + count) * 128]

        def take_columns(name, width, begin, count):
            data = tensors[name][2]
            return b"".join(data[2 * (row * width + begin) : 2 * (row * width + begin + count)] for row in range(64))

        def vocabulary(name):
            vocab = tensors[name][1][0]
            per_rank = (vocab + 63) // 64 * 64 // tp
            begin = min(rank * per_rank, vocab)
            real = take(name, begin, min((rank + 1) * per_rank, vocab) - begin)
            return ("BF16", [per_rank, 64], real + bytes(per_rank * 128 - len(real)))

        q, kv = 64 // tp, max(8, 16 // tp)
        kv_begin = rank * kv if tp <= 2 else 8 * (rank // (tp // 2))
        ff = 96 // tp
        out = {}
        if first:
            out["model.embed_tokens.weight"] = vocabulary("model.embed_tokens.weight")
        if last:
            out["lm_head.weight"] = vocabulary("lm_head.weight")
            out["model.norm.weight"] = tensors["model.norm.weight"]
        for layer in layers:
            at = f"model.layers.{layer}."
            if fused:
                whole = at + "self_attn.qkv_proj.weight"
                parts = take(whole, q * rank, q) + take(whole, 64 + kv_begin, kv) + take(whole, 80 + kv_begin, kv)
            else:
                parts = (take(at + "self_attn.q_proj.weight", q * rank, q) + take(at + "self_attn.k_proj.weight", kv_begin, kv)
                         + take(at + "self_attn.v_proj.weight", kv_begin, kv))
            out[at + "self_attn.qkv_proj.weight"] = ("BF16", [q + 2 * kv, 64], parts)
            out[at + "self_attn.o_proj.weight"] = ("BF16", [64, q], take_columns(at + "self_attn.o_proj.weight", 64, q * rank, q))
            gate, up = at + "mlp.gate_proj.weight", at + "mlp.up_proj.weight"
            out[at + "mlp.gate_up_proj.weight"] = ("BF16", [2 * ff, 64], take(gate, ff * rank, ff) + take(up, ff * rank, ff))
            out[at + "mlp.down_proj.weight"] = ("BF16", [64, ff], take_columns(at + "mlp.down_proj.weight", 96, ff * rank, ff))
            for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                out[at + norm] = tensors[at + norm]
        return out

    def test_case_006_and_007_padded_vocabulary(self):
        for vocab, tp in ((101, 2), (100, 4), (65, 4)):
            tensors = self.t0(vocab)
            for rank in range(tp):
                write_safetensors(self.dump, self.t0_worker(tensors, tp, rank, range(4), True, True))
                self.check(0, f"tp={tp}", rank)

    def test_case_009_more_ranks_than_kv_heads(self):
        tensors = self.t0()
        for rank in range(8):
            worker = self.t0_worker(tensors, 8, rank, range(4), True, True)
            self.assertEqual(worker["model.layers.0.self_attn.qkv_proj.weight"][1], [24, 64])
            write_safetensors(self.dump, worker)
            self.check(0, "tp=8", rank)

    def test_case_012_fused_on_disk(self):
        tensors = self.t0(fused=True)
        for tp, rank in ((2, 1), (4, 2)):
            write_safetensors(self.dump, self.t0_worker(tensors, tp, rank, range(4), True, True, fused=True))
            self.check(0, f"tp={tp}", rank)

    def test_pipeline_stages_leave_the_remainder_in_the_middle(self):
        tensors = self.t0()
        stages = [range(0, 1), range(1, 3), range(3, 4)]  # 4 layers on 3 stages
        for stage, layers in enumerate(stages):
            for rank in range(2):
                write_safetensors(self.dump, self.t0_worker(tensors, 2, rank, layers, stage == 0, stage == 2))
                self.check(0, "tp=2,pp=3", 2 * stage + rank)

    # 4 layers, the first one dense; hidden 8, 4 heads of 2, 2 KV heads, experts of width 6.

    def moe(self, experts, order=None, architecture="Qwen3MoeForCausalLM"):
        """order: None for a tensor an expert, "out" and "in" for what the stacks' second dim is."""
        nested = architecture.startswith("Qwen3VL")
        text = {"model_type": "qwen3_vl_moe_text" if nested else "qwen3_moe", "hidden_size": 8, "num_hidden_layers": 4,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 12, "vocab_size": 64,
                "num_experts": experts, "moe_intermediate_size": 6, "mlp_only_layers": [0], "tie_word_embeddings": False}
        config = {"architectures": [architecture], "torch_dtype": "bfloat16"}
        config |= {"model_type": "qwen3_vl_moe", "text_config": text} if nested else text
        root = "model.language_model." if nested else "model."
        shapes = {root + "embed_tokens.weight": [64, 8], "lm_head.weight": [64, 8], root + "norm.weight": [8]}
        for layer in range(4):
            at = f"{root}layers.{layer}."
            shapes |= {at + "self_attn.q_proj.weight": [8, 8], at + "self_attn.k_proj.weight": [4, 8],
                       at + "self_attn.v_proj.weight": [4, 8], at + "self_attn.o_proj.weight": [8, 8],
                       at + "self_attn.q_norm.weight": [2], at + "self_attn.k_norm.weight": [2],
                       at + "input_layernorm.weight": [8], at + "post_attention_layernorm.weight": [8]}
            if layer == 0:
                shapes |= {at + "mlp.gate_proj.weight": [12, 8], at + "mlp.up_proj.weight": [12, 8], at + "mlp.down_proj.weight": [8, 12]}
                continue
            shapes[at + "mlp.gate.weight"] = [experts, 8]
            for e in range(experts):
                shapes |= {f"{at}mlp.experts.{e}.gate_proj.weight": [6, 8], f"{at}mlp.experts.{e}.up_proj.weight": [6, 8],
                           f"{at}mlp.experts.{e}.down_proj.weight": [8, 6]}
        tensors = {name: ("BF16", shape, position_coded(name, "bfloat16", shape)) for name, shape in shapes.items()}
        on_disk = dict(tensors)
        if order is not None:
            for layer in range(1, 4):
                at = f"{root}layers.{layer}.mlp.experts."
                gate_up = [on_disk.pop(f"{at}{e}.gate_proj.weight")[2] + on_disk.pop(f"{at}{e}.up_proj.weight")[2] for e in range(experts)]
                down = [on_disk.pop(f"{at}{e}.down_proj.weight")[2] for e in range(experts)]
                for name, parts, rows, width in (("gate_up_proj", gate_up, 12, 8), ("down_proj", down, 8, 6)):
                    if order == "in":
                        parts = [b"".join(part[2 * (r * width + c) : 2 * (r * width + c) + 2] for c in range(width) for r in range(rows))
                                 for part in parts]
                        rows, width = width, rows
                    on_disk[at + name] = ("BF16", [experts, rows, width], b"".join(parts))
        self.write_model(config, on_disk)
        return {name.replace("model.language_model.", "model."): value for name, value in tensors.items()}

    def moe_worker(self, tensors, tp, rank, experts, whole, layers, first, last):
        """`experts`: numbers, written out by the test; `whole`: not cut by tp."""
        def take(name, begin, count):
            width = 2 * tensors[name][1][1]
            return tensors[name][2][begin * width : (begin + count) * width]

        def take_columns(name, begin, count):
            rows, width = tensors[name][1]
            return b"".join(tensors[name][2][2 * (r * width + begin) : 2 * (r * width + begin + count)] for r in range(rows))

        out = {}
        q, kv, ff = 8 // tp, 4 // tp, 12 // tp
        width, begin = (6, 0) if whole else (6 // tp, 6 // tp * rank)
        if first:
            out["model.embed_tokens.weight"] = ("BF16", [64 // tp, 8], take("model.embed_tokens.weight", 64 // tp * rank, 64 // tp))
        if last:
            out["model.norm.weight"] = tensors["model.norm.weight"]
            out["lm_head.weight"] = ("BF16", [64 // tp, 8], take("lm_head.weight", 64 // tp * rank, 64 // tp))
        for layer in layers:
            at = f"model.layers.{layer}."
            a, m = at + "self_attn.", at + "mlp."
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"):
                out[f"{at}{norm}.weight"] = tensors[f"{at}{norm}.weight"]
            parts = [(x, size) for x, size in (("q", q), ("k", kv), ("v", kv))]
            out[a + "qkv_proj.weight"] = ("BF16", [q + 2 * kv, 8],
                                          b"".join(take(f"{a}{x}_proj.weight", size * rank, size) for x, size in parts))
            out[a + "o_proj.weight"] = ("BF16", [8, q], take_columns(a + "o_proj.weight", q * rank, q))
            if layer == 0:
                out[m + "gate_up_proj.weight"] = ("BF16", [2 * ff, 8], take(m + "gate_proj.weight", ff * rank, ff)
                                                  + take(m + "up_proj.weight", ff * rank, ff))
                out[m + "down_proj.weight"] = ("BF16", [8, ff], take_columns(m + "down_proj.weight", ff * rank, ff))
                continue
            out[m + "gate.weight"] = tensors[m + "gate.weight"]
            out[m + "experts.routed_experts.w13_weight"] = ("BF16", [len(experts), 2 * width, 8], b"".join(
                take(f"{m}experts.{e}.gate_proj.weight", begin, width) + take(f"{m}experts.{e}.up_proj.weight", begin, width)
                for e in experts))
            out[m + "experts.routed_experts.w2_weight"] = ("BF16", [len(experts), 8, width], b"".join(
                take_columns(f"{m}experts.{e}.down_proj.weight", begin, width) for e in experts))
        return out

    def test_experts_in_blocks(self):
        tensors = self.moe(5)
        cases = [
            ("tp=2", 1, (2, 1, [0, 1, 2, 3, 4], False, range(4), True, True)),
            ("tp=1,dp=2", 1, (1, 0, [0, 1, 2, 3, 4], False, range(4), True, True)),
            ("ep=2", 0, (2, 0, [0, 1, 2], True, range(4), True, True)),
            ("ep=2", 1, (2, 1, [3, 4], True, range(4), True, True)),
            # Replica 1, data-parallel rank 1, stage 1, rank 1: expert rank 3 of 4.
            ("tp=2,dp=2,ep=4,pp=2,replicas=2", 15, (2, 1, [4], True, range(2, 4), False, True)),
            ("tp=2,dp=2,ep=4,pp=2", 0, (2, 0, [0, 1], True, range(2), True, False)),
        ]
        for inference, worker, arguments in cases:
            with self.subTest(inference=inference, worker=worker):
                write_safetensors(self.dump, self.moe_worker(tensors, *arguments))
                self.check(0, inference, worker)
        self.assertIn("5 experts on 6 ranks", self.check(2, "tp=2,dp=3,ep=6", 0))
        self.check(2, "tp=2,dp=2,ep=2", 0)

    def test_case_034_and_035_stacked_experts_in_two_orders(self):
        vl = "Qwen3VLMoeForConditionalGeneration"
        for order, architecture in (("out", "Qwen3MoeForCausalLM"), (None, vl), ("out", vl), ("in", vl)):
            tensors = self.moe(4, order, architecture)
            for inference, worker, arguments in (("tp=2", 1, (2, 1, range(4), False)), ("ep=2", 1, (2, 1, [2, 3], True))):
                with self.subTest(order=order, architecture=architecture, inference=inference):
                    parameters = self.moe_worker(tensors, *arguments, range(4), True, True)
                    if architecture == vl:
                        parameters = {f"language_model.{name}": value for name, value in parameters.items()}
                    write_safetensors(self.dump, parameters)
                    self.check(0, inference, worker)
        self.moe(4, "in")
        self.assertIn("has shape", self.check(2, "tp=1", 0))

    def test_wrong_use(self):
        tensors = self.t0()
        write_safetensors(self.dump, self.t0_worker(tensors, 1, 0, range(4), True, True))
        self.check(2, "tp=1", 1)
        self.check(2, "tp=two", 0)
        self.assertIn("do not divide", self.check(2, "tp=5", 0))
        self.dump.write_bytes(b"short")
        self.check(2, "tp=1", 0)


if __name__ == "__main__":
    unittest.main()

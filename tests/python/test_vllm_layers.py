"""New weights in running vLLM models, in cases that a whole fleet does not bring about: every answer is that of an engine started on them.

The models' own loaders write real tensors into the memory that a sync would land in; what is tested is all that comes after.
"""
# ctest-timeout: 600
# ctest-processors: 2

import copy
import unittest

import fleets  # noqa: F401  (first: it finds the package)
import shardpull
import torch
import vllm_models
from vllm_engines import answers, started, worker_of

from shardpull.vllm._layers import LayerwiseUpdate

UNTOUCHED = 0xFD  # no loader writes a parameter that consists of it


class Landing:
    """Memory for all that the loaders of a model may write, and the updates from it."""

    def __init__(self, llm):
        self.llm = llm
        worker = worker_of(llm)
        self.model = worker.model_runner.model
        self.update = LayerwiseUpdate(self.model, worker.vllm_config, torch.device("cpu"))
        self.memory = {
            name: torch.empty_strided(one.shape, one.stride, dtype=one.dtype) for name, one in self.update.loadables.items()
        }

    def land(self, weights):
        """What a sync does to the memory, without the sync. Names of what was written."""
        for tensor in self.memory.values():
            tensor.untyped_storage().fill_(UNTOUCHED)
        with torch.no_grad(), self.update.checkpoint_format(self.memory):
            self.model.load_weights((name, tensor.clone()) for name, tensor in weights.items())
        return [name for name, tensor in self.memory.items() if (torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()) != UNTOUCHED).any()]

    def apply(self, written, finish=True):
        modules = {}
        for name in written:
            one = self.update.loadables[name]
            modules.setdefault(one.module, {})[one.tensor] = self.memory[name]
        self.update.begin()
        for module, tensors in modules.items():
            self.update.process(module, tensors)
        if finish:
            self.update.finish()
            self.llm.reset_prefix_cache()

    def to(self, weights):
        self.apply(self.land(weights))


class Layers(unittest.TestCase):
    maxDiff = None

    def fresh(self, model, weights):
        with started(model, weights) as llm:
            return answers(llm)

    def test_rounding_is_that_of_loading(self):
        """A checkpoint in float32, and biases that the kernels hold in float32, but which are loaded in bfloat16."""
        fine = vllm_models.weights_of("qwen2", 1, torch.float32)
        with started("qwen2", 0) as llm:
            landing = Landing(llm)
            self.assertEqual(landing.memory["model.layers.0.self_attn.qkv_proj.bias"].dtype, torch.bfloat16)
            self.assertEqual(dict(landing.model.named_parameters())["model.layers.0.self_attn.qkv_proj.bias"].dtype, torch.float32)
            landing.to(fine)
            got = answers(llm)
        self.assertEqual(got, self.fresh("qwen2", fine))

    def test_what_was_left_unfinished_is_repaired(self):
        """Half of an update, given up: the engine answers, modules that were not reached as before; the next one is exact."""
        old, new = vllm_models.weights_of("deepseek_v3", 0), vllm_models.weights_of("deepseek_v3", 1)
        with started("deepseek_v3", old) as llm:
            before = answers(llm)
            landing = Landing(llm)
            written = landing.land(new)
            landing.apply(written[: len(written) // 2], finish=False)
            landing.update.abort()
            llm.reset_prefix_cache()
            self.assertNotEqual(answers(llm), before)
            landing.apply(written[: len(written) // 2], finish=False)  # never ended
            landing.to(new)
            got_new = answers(llm)
            landing.to(old)
            got_old = answers(llm)
        self.assertEqual(got_old, before)
        self.assertEqual(got_new, self.fresh("deepseek_v3", new))

    def test_some_modules(self):
        """What an update does not bring stays, also where latent attention has freed what it would derive it from again."""
        old, new = vllm_models.weights_of("deepseek_v3", 0), vllm_models.weights_of("deepseek_v3", 1)
        mixed = {name: (new if ".experts." in name or "correction_bias" in name or "q_b_proj" in name else old)[name] for name in old}
        with started("deepseek_v3", old) as llm:
            landing = Landing(llm)
            written = landing.land(mixed)
            landing.apply([name for name in written if "routed_experts" in name or "correction_bias" in name or "q_b_proj" in name or "mlp.gate." in name])
            got = answers(llm)
        self.assertEqual(got, self.fresh("deepseek_v3", mixed))

    def test_a_worker_that_takes_the_model_apart_itself(self):
        """As older ones do: they begin and end the reload of vLLM's around the update."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with started("qwen3_moe", 0) as llm:
            landing = Landing(llm)
            written = landing.land(vllm_models.weights_of("qwen3_moe", 1))
            initialize_layerwise_reload(landing.model)
            landing.apply(written, finish=False)
            finalize_layerwise_reload(landing.model, worker_of(llm).vllm_config.model_config)
            landing.update.finish()
            llm.reset_prefix_cache()
            got = answers(llm)
            landing.to(vllm_models.weights_of("qwen3_moe", 0))  # and in our own way after it
            again = answers(llm)
        self.assertEqual(got, self.fresh("qwen3_moe", 1))
        self.assertEqual(again, self.fresh("qwen3_moe", 0))

    def test_a_head_that_was_equal_to_the_embeddings(self):
        """The checkpoint has a head of its own though its config ties it: equal at first, so that vLLM ties them, and later not."""
        equal, different = vllm_models.weights_of("llama_tied", 0), vllm_models.weights_of("llama_tied", 1)
        equal["lm_head.weight"] = equal["model.embed_tokens.weight"].clone()
        different["lm_head.weight"] = vllm_models.weights_of("llama", 1)["lm_head.weight"]
        with started("llama_tied", equal) as llm:
            landing = Landing(llm)
            self.assertEqual(landing.update.aliases, {})
            landing.to(different)
            got = answers(llm)
            landing.to(equal)
            again = answers(llm)
        self.assertEqual(got, self.fresh("llama_tied", different))
        self.assertEqual(again, self.fresh("llama_tied", equal))

    def test_refusals(self):
        with started("qwen2", 0) as llm:
            worker = worker_of(llm)
            model, config = worker.model_runner.model, worker.vllm_config
            with self.assertRaisesRegex(shardpull.UnimplementedError, "the model is on cuda:1"):
                LayerwiseUpdate(model, config, torch.device("cuda:1"))
            with self.assertRaisesRegex(shardpull.UnimplementedError, "quantised as fp8"):
                LayerwiseUpdate(model, _with(config, quantization="fp8"), torch.device("cpu"))
            layer = torch.nn.Module()
            layer.sinks = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
            with self.assertRaisesRegex(shardpull.UnimplementedError, "float16 attention sinks"):
                LayerwiseUpdate(layer, _with(config, dtype=torch.float16), torch.device("cpu"))
            landing = Landing(llm)
            before = answers(llm)
            landing.land(vllm_models.weights_of("qwen2", 1))
            module = model.model.layers[0].self_attn.qkv_proj
            weight, bias = (landing.memory[f"model.layers.0.self_attn.qkv_proj.{name}"] for name in ("weight", "bias"))
            for landed, what in (
                ({"bias": bias}, "new tensors .bias. but none for weight"),
                ({"weight": weight, "scale": bias}, "'scale' is nothing that model.layers.0.self_attn.qkv_proj loads"),
                ({"weight": weight.float(), "bias": bias}, r"loaded as torch.bfloat16 \(192, 64\), not torch.float32"),
            ):
                with self.assertRaisesRegex(shardpull.InvalidArgumentError, what):
                    landing.update.process(module, landed)
            with self.assertRaisesRegex(shardpull.UnimplementedError, "attention layer with tensors of its own"):
                landing.update.process(model.model.layers[0].self_attn.attn, {"_k_scale": bias})
            llm.reset_prefix_cache()
            self.assertEqual(answers(llm), before)


def _with(config, **changes):
    """A configuration of another model."""
    config = copy.copy(config)
    config.model_config = copy.copy(config.model_config)
    for name, value in changes.items():
        setattr(config.model_config, name, value)
    return config


if __name__ == "__main__":
    unittest.main()

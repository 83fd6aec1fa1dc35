"""Engines of vLLM for the tests, in this process, and what they answer."""

import atexit
import contextlib
import gc
import os
import pathlib
import shutil
import sys
import tempfile

from fleets import PACKAGE_ROOT

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # of several processes each would bind the same cores
    TORCHDYNAMO_DISABLE="1",  # what vLLM compiles even when told to be eager takes longer than all tests
)  # fmt: skip


def of_all_processes():
    """A folder with a plugin for every process of an engine: it asks Linux for AMX, without which no process may use it.

    Attention of vLLM's relies on somebody having done so, and in a worker nobody has.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="shardpull-plugin-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "tests_amx.py").write_text("def request():\n    import torch\n    torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()\n")
    info = folder / "tests_amx-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tests_amx\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ntests_amx = tests_amx:request\n")
    return str(folder)


sys.path.append(of_all_processes())
os.environ["PYTHONPATH"] = os.pathsep.join([str(PACKAGE_ROOT), sys.path[-1]])  # of the processes that an engine starts

import shardpull
import vllm_models
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


class Source(shardpull.TensorSource):
    """A model's weights in memory of their own, as a trainer has them."""

    def __init__(self, model, version):
        self.model = model
        self.weights = vllm_models.weights_of(model, version)
        self.broken = False
        self.before_group = None
        """Called with the number of each group before it is published."""
        super().__init__(self.weights)

    def step(self, version):
        """To the weights of another version, in place."""
        for name, tensor in vllm_models.weights_of(self.model, version).items():
            self.weights[name].copy_(tensor)

    def iter_groups(self, request):
        for number, group in enumerate(super().iter_groups(request)):
            if self.broken and number == 2:
                raise OSError("the disk is on fire")
            if self.before_group is not None:
                self.before_group(number)
            yield group


PROMPTS = [[5, 17, 300, 42], list(range(10, 40)), [999, 1, 7]]
SETTINGS = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4}


@contextlib.contextmanager
def engine(path, **settings):
    """An engine on a checkpoint's directory."""
    llm = LLM(str(path), **{**SETTINGS, **settings})
    try:
        yield llm
    finally:
        with contextlib.suppress(Exception):
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def started(model, weights, **settings):
    """An engine that started on these weights, or on this version of the model's."""
    if isinstance(weights, int):
        weights = vllm_models.weights_of(model, weights)
    with tempfile.TemporaryDirectory(prefix="shardpull-vllm-") as directory:
        with engine(vllm_models.write(model, pathlib.Path(directory), weights), **settings) as llm:
            yield llm


def answers(llm):
    """The tokens that it generates greedily, and the probability of each, bit by bit."""
    parameters = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
    out = []
    for request in llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], parameters, use_tqdm=False):
        answer = request.outputs[0]
        out.append([(token, chosen[token].logprob) for token, chosen in zip(answer.token_ids, answer.logprobs, strict=True)])
    return out


def worker_of(llm):
    return llm.llm_engine.model_executor.driver_worker.worker

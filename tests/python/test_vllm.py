"""Real vLLM engines in a fleet: after each sync every answer is that of an engine started on those weights."""
# ctest-timeout: 1800
# ctest-processors: 2

import contextlib
import gc
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

from fleets import SOURCE_DIR, FleetTest  # first: it finds the package

import shardpull
import vllm_models
from vllm_engines import PROMPTS, answers, started, worker_of

from shardpull.vllm import HTTPClient, OfflineClient, Trainer, register

sys.path.insert(0, str(SOURCE_DIR / "tests" / "integration"))
from fleet_testing import held_by

BACKEND = {"weight_transfer_config": {"backend": "shardpull"}}
START_S = 300


class Source(shardpull.TensorSource):
    """A model's weights in memory of their own, as a trainer has them."""

    def __init__(self, model, version):
        self.model = model
        self.weights = vllm_models.weights_of(model, version)
        self.broken = False
        super().__init__(self.weights)

    def step(self, version):
        """To the weights of another version, in place."""
        for name, tensor in vllm_models.weights_of(self.model, version).items():
            self.weights[name].copy_(tensor)

    def iter_groups(self, request):
        for number, group in enumerate(super().iter_groups(request)):
            if self.broken and number == 2:
                raise OSError("the disk is on fire")
            yield group


class VLLM(FleetTest):
    maxDiff = None

    def check(self, model, **settings):
        with started(model, 1, **settings) as llm:
            fresh_1 = answers(llm)
        with started(model, 0, **settings, **BACKEND) as llm:
            fresh_0 = answers(llm)
            self.assertNotEqual(fresh_0, fresh_1)
            source = Source(model, 0)
            with Trainer(source, OfflineClient(llm), **self.fleet()) as trainer:
                trainer.init()
                for version, fresh in ((1, fresh_1), (0, fresh_0), (1, fresh_1)):
                    source.step(version)
                    trainer.send_weights(version)
                    self.assertEqual(answers(llm), fresh)
                    self.assertEqual(llm.get_weight_version(), str(version))

    def check_two(self, model):
        """Two workers, in processes of their own. What two compute may differ from what one does: compared with two."""
        self.check(model, tensor_parallel_size=2, distributed_executor_backend="mp")

    def test_two_workers_qwen3(self):
        self.check_two("qwen3")

    def test_two_workers_qwen3_moe(self):
        self.check_two("qwen3_moe")

    def test_two_workers_deepseek_v3(self):
        self.check_two("deepseek_v3")


for _model in vllm_models.CONFIGS:
    setattr(VLLM, f"test_{_model}", lambda self, model=_model: self.check(model))


class Server:
    """`vllm serve` of a model's version, in a process of its own."""

    def __init__(self, model, version, directory):
        path = vllm_models.write(model, pathlib.Path(directory) / model, vllm_models.weights_of(model, version))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = open(pathlib.Path(directory) / "server.log", "w+")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", path, "--served-model-name", "m", "--host", "127.0.0.1",
             "--port", str(port), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "256", "--max-num-seqs", "4", "--enable-scale-out",
             "--weight-transfer-config", json.dumps({"backend": "shardpull"})],
            env={**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            start_new_session=True)  # fmt: skip

    def wait(self):
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"the server did not start:\n{self.log()}") from None
                time.sleep(0.2)

    def log(self):
        self._log.flush()
        return pathlib.Path(self._log.name).read_text()[-6000:]

    def tokens(self):
        out = []
        for prompt in PROMPTS:
            body = {"token_ids": prompt, "model": "m", "sampling_params": {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "detokenize": False}}
            request = urllib.request.Request(f"{self.url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    out.append(json.loads(response.read())["choices"][0]["token_ids"])
            except OSError as error:
                raise AssertionError(f"{error}:\n{self.log()}") from error
        return out

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._log.close()


class OverHTTP(FleetTest):
    def test_served(self):
        with started("qwen3", 1) as llm:
            fresh = [[token for token, _ in answer] for answer in answers(llm)]
        with tempfile.TemporaryDirectory(prefix="shardpull-vllm-") as directory:
            server = Server("qwen3", 0, directory)
            self.addCleanup(server.stop)
            server.wait()
            before = server.tokens()
            self.assertNotEqual(before, fresh)
            client = HTTPClient(server.url)
            self.assertEqual(client.world_size(), 1)
            source = Source("qwen3", 0)
            with Trainer(source, client, **self.fleet()) as trainer:
                trainer.init()
                for version, wanted in ((1, fresh), (0, before), (1, fresh)):
                    source.step(version)
                    trainer.send_weights(version)
                    self.assertEqual(server.tokens(), wanted)
                    self.assertEqual(client.weight_version(), str(version))
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "start_weight_update: 500"):
                client.start_weight_update()  # the fleet has ended


class Refusing(OfflineClient):
    """An engine that does not get as far as an update."""

    def update_weights(self, update_info):
        raise RuntimeError("this engine does not update")


class Failures(FleetTest):
    """One engine through all of it: after each failure it answers, and the next sync is exact."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        with started("qwen3_moe", 1) as llm:
            cls.fresh_1 = answers(llm)
        cls.engine = contextlib.ExitStack()
        cls.llm = cls.engine.enter_context(started("qwen3_moe", 0, **BACKEND))
        cls.fresh_0 = answers(cls.llm)
        register()  # as often as one likes

    @classmethod
    def tearDownClass(cls):
        cls.engine.close()

    def to_0(self):
        """Back to where all tests begin, by a sync; which shows that the engine is well."""
        source = Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            trainer.send_weights(0)
        self.assertEqual(answers(self.llm), self.fresh_0)

    def test_a_sync_that_fails(self):
        source = Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            source.broken = True
            for _ in range(2):
                with self.assertRaisesRegex(OSError, "the disk is on fire"):
                    trainer.send_weights(1)
                self.llm.reset_prefix_cache()
                answers(self.llm)
            source.broken = False
            trainer.send_weights(1)
            self.assertEqual(answers(self.llm), self.fresh_1)
            source.step(0)
            trainer.send_weights(2)
            self.assertEqual(answers(self.llm), self.fresh_0)

    def test_a_hundred_syncs_grow_nothing(self):
        """Memory, threads, descriptors and mapped files of trainer and engine, which are one process here."""
        source, held = Source("qwen3_moe", 0), []
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            for version in range(1, 141):
                trainer.send_weights(version)
                if version % 20 == 0:
                    self.assertEqual(answers(self.llm), self.fresh_0)
                if version in (40, 140):
                    gc.collect()
                    held.append(held_by(os.getpid()))
        (*counts, memory), (*counts_after, memory_after) = held
        self.assertEqual(counts_after, counts)
        self.assertLess(memory_after - memory, 4 << 20)

    def test_staged(self):
        source = Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), engine={"apply": "staged"}, **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            source.broken = True
            with self.assertRaisesRegex(OSError, "the disk is on fire"):
                trainer.send_weights(1)
            self.llm.reset_prefix_cache()
            self.assertEqual(answers(self.llm), self.fresh_0)  # nothing has changed
            source.broken = False
            trainer.send_weights(1)
            self.assertEqual(answers(self.llm), self.fresh_1)
        self.to_0()

    def test_some_names(self):
        source = Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            trainer.send_weights(1)
            source.step(1)
            trainer.send_weights(2, ["model.layers.*"])
            source.step(0)
            for name, tensor in vllm_models.weights_of("qwen3_moe", 1).items():
                if name.startswith("model.layers."):
                    source.weights[name].copy_(tensor)
            mixed = answers(self.llm)
            trainer.send_weights(3)  # all names of the same weights
            self.assertEqual(answers(self.llm), mixed)
        self.to_0()

    def test_an_engine_that_does_not_update(self):
        source = Source("qwen3_moe", 0)
        with Trainer(source, Refusing(self.llm), **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            with self.assertRaisesRegex(RuntimeError, "this engine does not update"):
                trainer.send_weights(1)
            self.assertEqual(answers(self.llm), self.fresh_0)
            worker_of(self.llm)._weight_update_active = False  # which that client has left so
            with self.assertRaises(shardpull.Error):
                trainer.send_weights(1)  # the fleet has ended
        worker_of(self.llm)._weight_update_active = False
        self.to_0()

    def test_engines_that_cannot_join(self):
        source = Source("qwen3_moe", 0)
        for what, options in (
            ("path", {"engine": {"path": "sideways"}}),
            ("unexpected keyword argument 'colour'", {"engine": {"colour": "blue"}}),
            ("num_consumers is 3 for 1 engines; this engine has 1 workers", {"num_consumers": 3}),
        ):
            with self.subTest(what), Trainer(source, OfflineClient(self.llm), **self.fleet(), **options) as trainer:
                with self.assertRaisesRegex(Exception, what):
                    trainer.init()
        half = dict(list(source.weights.items())[:-1])
        with Trainer(shardpull.TensorSource(half), OfflineClient(self.llm), **self.fleet()) as trainer:
            with self.assertRaisesRegex(shardpull.Error, "lm_head.weight"):
                trainer.init()
        self.assertEqual(answers(self.llm), self.fresh_0)
        self.to_0()

    def test_calls_out_of_order(self):
        engine = worker_of(self.llm).weight_transfer_engine
        self.assertFalse(engine.supports_draft_weight_update)
        self.assertTrue(engine.defers_processing)
        engine.shutdown()
        info = {"package_version": shardpull.__version__, "num_consumers": 1, "directory": str(self.directory), "token": 1}
        for what, call in (
            ("start_weight_update before init", engine.start_weight_update),
            ("update_weights before init", lambda: engine.update_weights({"version": 1, "ticket": 1})),
            ("finish_weight_update without an update", engine.finish_weight_update),
            ("the trainer has shardpull 9.9.9, this worker", lambda: engine.init_transfer_engine(engine.parse_init_info({**info, "package_version": "9.9.9"}))),
            ("apply must be", lambda: engine.init_transfer_engine(engine.parse_init_info({**info, "apply": "sometimes"}))),
            ("updates of a draft model", lambda: engine.set_weight_update_target(object(), None)),
            ("does not support draft model weight updates", self.llm.start_draft_weight_update),
            ("replica_rank is 2, of 1 engines", lambda: engine.init_transfer_engine(engine.parse_init_info({**info, "replica_rank": 2}))),
        ):
            with self.subTest(what), self.assertRaisesRegex(RuntimeError, what):
                call()
        for unknown in ({"colour": "blue"}, {**info, "rank": 1}):
            with self.assertRaises(ValueError):
                engine.parse_init_info(unknown)
        with self.assertRaises(ValueError):
            engine.parse_update_info({"version": 1, "ticket": 1, "names": []})
        parallel = engine.parallel_config
        parallel.enable_eplb = True
        try:
            with self.assertRaisesRegex(shardpull.UnimplementedError, "enable_eplb"):
                engine.init_transfer_engine(engine.parse_init_info(info))
        finally:
            parallel.enable_eplb = False
        source = Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            engine.start_weight_update()
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "a second time before finish"):
                engine.start_weight_update()
        self.to_0()


if __name__ == "__main__":
    unittest.main()

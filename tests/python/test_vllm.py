"""Real vLLM engines in a fleet: after each sync every answer is that of an engine started on those weights."""
# ctest-timeout: 1800
# ctest-processors: 2

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import unittest

from fleets import SOURCE_DIR, Background, FleetTest  # first: it finds the package

import shardpull
import vllm_models
from vllm import SamplingParams
from vllm_engines import PROMPTS, Source, answers, started, worker_of

from shardpull.vllm import OfflineClient, Trainer, register

sys.path.insert(0, str(SOURCE_DIR / "tests" / "integration"))
from fleet_testing import held_by

BACKEND = {"weight_transfer_config": {"backend": "shardpull"}}


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

    def test_one_of_two_workers_is_killed(self):
        """vLLM gives the engine up then; the trainer is told who was lost, soon, and a new engine is in its next sync."""
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        source = Source("qwen3", 0)
        with contextlib.ExitStack() as stack:
            with started("qwen3", 0, **two, **BACKEND) as llm:
                trainer = stack.enter_context(Trainer(source, OfflineClient(llm), **self.fleet()))
                trainer.init()
                trainer.send_weights(0)
                fresh = answers(llm)
                for _ in range(2):  # vLLM takes one worker's exception, and would take the other's for an answer to the next call
                    source.broken = True
                    with self.assertRaisesRegex(OSError, "the disk is on fire"):
                        trainer.send_weights(1)
                    source.broken = False
                    trainer.send_weights(0)
                    self.assertEqual(answers(llm), fresh)
                killed = llm.llm_engine.model_executor.workers[1].proc.pid

                def kill(number):
                    if number == 2:
                        os.kill(killed, signal.SIGKILL)

                source.before_group = kill
                killed_at = time.monotonic()
                with self.assertRaisesRegex(shardpull.UnavailableError, "worker 1 is lost"):
                    trainer.send_weights(1)
                self.assertLess(time.monotonic() - killed_at, 60)
                self.assertEqual(trainer.lost, [0])
            source.before_group = None
            with started("qwen3", 0, **two, **BACKEND) as llm:
                before = answers(llm)
                trainer.rejoin(0, OfflineClient(llm))
                source.step(1)
                trainer.send_weights(1)
                self.assertNotEqual(answers(llm), before)
                source.step(0)
                trainer.send_weights(0)
                self.assertEqual(answers(llm), before)


for _model in vllm_models.CONFIGS:
    setattr(VLLM, f"test_{_model}", lambda self, model=_model: self.check(model))


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

    def test_requests_that_have_not_ended(self):
        engine, source = self.llm.llm_engine, Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            engine.add_request("running", {"prompt_token_ids": PROMPTS[0]}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False))
            engine.step()
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "1 requests that have not ended"):
                trainer.send_weights(1)
            while engine.has_unfinished_requests():
                ended = engine.step()
            self.assertEqual(list(ended[-1].outputs[0].token_ids), [token for token, _ in self.fresh_0[0]])
            trainer.send_weights(1)
            self.assertEqual(answers(self.llm), self.fresh_1)
        self.to_0()

    def test_a_second_sync_before_the_first_has_ended(self):
        source, begun, go_on = Source("qwen3_moe", 0), threading.Event(), threading.Event()

        def wait(number):
            begun.set()
            self.assertTrue(go_on.wait(60))

        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            source.before_group = wait
            first = Background(lambda: trainer.send_weights(1))
            self.assertTrue(begun.wait(60))
            for second in (lambda: trainer.send_weights(2), lambda: trainer.rejoin(0)):
                with self.assertRaisesRegex(shardpull.FailedPreconditionError, "while another thread's call of this trainer runs"):
                    second()
            go_on.set()
            self.assertEqual(first.result().version, 1)
            self.assertEqual(answers(self.llm), self.fresh_1)
        self.to_0()

    def test_a_line_that_breaks_within_an_update(self):
        """After vLLM has begun one, and before it has ended one: the same trainer's next sync is exact."""

        class Broken(OfflineClient):
            where = None

            def start_weight_update(self):
                super().start_weight_update()
                self.break_at("start")

            def finish_weight_update(self, weight_version=None):
                self.break_at("finish")
                super().finish_weight_update(weight_version)

            def break_at(self, here):
                if self.where == here:
                    raise OSError("the line broke")

        source = Source("qwen3_moe", 0)
        client = Broken(self.llm)
        with Trainer(source, client, **self.fleet()) as trainer:
            trainer.init()
            for where, holds in (("start", self.fresh_0), ("finish", self.fresh_1)):
                source.step(1)
                client.where = where
                with self.assertRaisesRegex(OSError, "the line broke"):
                    trainer.send_weights(1)
                self.llm.reset_prefix_cache()
                self.assertEqual(answers(self.llm), holds)
                client.where = None
                trainer.send_weights(1)
                self.assertEqual(answers(self.llm), self.fresh_1)
                source.step(0)
                trainer.send_weights(0)
                self.assertEqual(answers(self.llm), self.fresh_0)
        self.to_0()

    def test_names_after_a_sync_that_failed(self):
        """Some of its modules may be new: only all names make the engine whole."""
        source = Source("qwen3_moe", 0)
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            source.broken = True
            with self.assertRaisesRegex(OSError, "the disk is on fire"):
                trainer.send_weights(1)
            source.broken = False
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "all are to be sent"):
                trainer.send_weights(1, ["lm_head.*"])
            trainer.send_weights(1)
            trainer.send_weights(2, ["lm_head.*"])
            self.assertEqual(answers(self.llm), self.fresh_1)
        self.to_0()

    def test_an_engine_that_does_not_update(self):
        source = Source("qwen3_moe", 0)
        with Trainer(source, Refusing(self.llm), **self.fleet()) as trainer:
            trainer.init()
            source.step(1)
            with self.assertRaisesRegex(RuntimeError, "this engine does not update"):
                trainer.send_weights(1)
            self.assertEqual(answers(self.llm), self.fresh_0)
            with self.assertRaises(shardpull.Error):
                trainer.send_weights(1)  # the fleet has ended
        self.to_0()

    def test_engines_that_cannot_join(self):
        source = Source("qwen3_moe", 0)
        for what, options in (
            ("path", {"engine": {"path": "sideways"}}),
            ("num_consumers is 3 for 1 engines, but engine 0 has 1 workers", {"num_consumers": 3}),
        ):
            with self.subTest(what), Trainer(source, OfflineClient(self.llm), **self.fleet(), **options) as trainer:
                with self.assertRaisesRegex(Exception, what):
                    trainer.init()
        half = dict(list(source.weights.items())[:-1])
        with Trainer(shardpull.TensorSource(half), OfflineClient(self.llm), **self.fleet()) as trainer:
            with self.assertRaisesRegex(shardpull.Error, "lm_head.weight"):
                trainer.init()
        small = {**source.weights, "model.embed_tokens.weight": source.weights["model.embed_tokens.weight"][:300].clone()}
        with Trainer(shardpull.TensorSource(small), OfflineClient(self.llm), **self.fleet()) as trainer:
            with self.assertRaisesRegex(shardpull.Error, r"last tensor that they took of the trainer's was model.embed_tokens.weight \[300, 64\]"):
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
            ("the trainer has shardpull 9.9.9, this worker", lambda: engine.init_transfer_engine(engine.parse_init_info({**info, "package_version": "9.9.9"}))),
            ("apply must be", lambda: engine.init_transfer_engine(engine.parse_init_info({**info, "apply": "sometimes"}))),
            ("updates of a draft model", lambda: engine.set_weight_update_target(object(), None)),
            ("does not support draft model weight updates", self.llm.start_draft_weight_update),
            ("num_consumers is 3 for 2 engines of as many workers each", lambda: engine.init_transfer_engine(engine.parse_init_info({**info, "num_consumers": 3, "num_replicas": 2}))),
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
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "update_weights before start"):
                engine.update_weights({"version": 1, "ticket": 1})
            self.llm.start_weight_update()  # and its trainer is gone
            trainer.fleet.shutdown()
        with Trainer(source, OfflineClient(self.llm), **self.fleet()) as trainer:
            with self.assertRaisesRegex(shardpull.InvalidArgumentError, "there is no option 'colour'"):
                Trainer(source, OfflineClient(self.llm), engine={"colour": "blue"}, **self.fleet())
        self.to_0()


if __name__ == "__main__":
    unittest.main()

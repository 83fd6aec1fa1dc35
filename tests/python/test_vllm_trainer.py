"""The trainer's side of vLLM without vLLM: engines that keep what its routes keep, and fail where they are told to."""

import threading
import unittest

import numpy

from fleets import Background, FleetTest  # first: it finds the package

import shardpull

from shardpull.vllm import Trainer
from shardpull.vllm._protocol import GIVEN_UP, READY


class Ended(Exception):
    pass


class Broken(Exception):
    pass


class Engine:
    """One of `world` workers, all here: what vLLM and its worker know of an update, and its weights."""

    def __init__(self, size, world=1):
        self.size, self.world = size, world
        self.kept = [numpy.zeros(size, "u1") for _ in range(world)]
        self.workers = []
        self.active = self.paused = False
        self.version = None
        self.resets = 0
        self.fails = ""

    def fail(self, where):
        if self.fails == where:
            raise Broken(where)

    def world_size(self):
        return self.world

    def init_weight_transfer_engine(self, info):
        self.fail("init")
        self.shutdown_weight_transfer_engine()
        own = {"package_version", "num_consumers", "num_replicas", "replica_rank"}
        options = {name: value for name, value in info.items() if name not in own}
        joining = [
            Background(lambda i=i: shardpull.Worker(shardpull.Model({"w": self.kept[i]}), consumer=info["replica_rank"] * self.world + i, **options))
            for i in range(self.world)
        ]
        self.workers = [one.result() for one in joining]

    def shutdown_weight_transfer_engine(self):
        for worker in self.workers:
            worker.shutdown()
        self.workers = []

    def start_weight_update(self):
        self.fail("start")
        if self.active:
            raise RuntimeError("already active")
        self.active = True
        self.fail("after start")

    def update_weights(self, info):
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            if info["ticket"] == GIVEN_UP:
                raise RuntimeError("given up")
            self.fail("update")
            for serving in [Background(lambda worker=worker: self.serve(worker, info)) for worker in self.workers]:
                serving.result()
            self.fail("after update")
        except BaseException:
            self.active = False
            raise

    @staticmethod
    def serve(worker, info):
        outcome = []

        def ended(version, error, report):
            outcome.append((version, error))
            raise Ended

        worker.send_message("trainer 0", READY, str(info["ticket"]))
        try:
            worker.serve(ended)
        except Ended:
            pass
        if not outcome:
            raise RuntimeError("the fleet has ended")
        if outcome[0][1] is not None:
            raise outcome[0][1]
        assert outcome[0][0] == info["version"]

    def finish_weight_update(self, weight_version=None):
        self.fail("finish")
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.active = False
        self.version = weight_version

    def reset_prefix_cache(self):
        self.fail("reset")
        self.resets += 1

    def pause(self):
        self.fail("pause")
        self.paused = True

    def resume(self):
        self.fail("resume")
        self.paused = False


class Source(shardpull.TensorSource):
    def __init__(self, size):
        self.weights = numpy.zeros(size, "u1")
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.broken = False
        super().__init__({"w": self.weights})

    def iter_groups(self, request):
        self.begun.set()
        if not self.go_on.wait(60):
            raise Broken("nobody went on")
        if self.broken:
            raise Broken("source")
        yield from super().iter_groups(request)


SIZE = 100_000


class Driving(FleetTest):
    def setUp(self):
        super().setUp()
        self.engines = [Engine(SIZE), Engine(SIZE)]
        self.source = Source(SIZE)

    def trainer(self, **options):
        return Trainer(self.source, self.engines, **self.fleet(), **options)

    def sync(self, trainer, version):
        self.source.weights[:] = numpy.arange(SIZE, dtype="u4") * 7 + version
        trainer.send_weights(version)

    def check(self, version, *engines):
        for engine in engines or self.engines:
            for kept in engine.kept:
                self.assertTrue((kept == self.source.weights).all())
            self.assertEqual((engine.version, engine.active, engine.paused), (str(version), False, False))

    def test_syncs(self):
        with self.trainer() as trainer:
            trainer.init()
            for version in (1, 2, 3):
                self.sync(trainer, version)
                self.check(version)
            self.assertEqual([engine.resets for engine in self.engines], [3, 3])
            self.assertEqual(trainer.lost, [])
        self.assertEqual([engine.workers for engine in self.engines], [[], []])

    def test_two_workers_each(self):
        self.engines = [Engine(SIZE, 2), Engine(SIZE, 2)]
        with self.trainer() as trainer:
            trainer.init()
            self.sync(trainer, 1)
            self.check(1)

    def test_a_call_that_fails(self):
        """Of either engine, at each place, in place and staged: who has one version goes on, and the next sync is exact for both."""
        before, after = ("pause", "start", "after start"), ("after update", "finish", "reset", "resume")
        for apply in ("inplace", "staged"):
            with self.trainer(engine={"apply": apply}) as trainer:
                trainer.init()
                version = 1
                self.sync(trainer, version)
                for where in before + after:
                    for number, engine in enumerate(self.engines):
                        other = self.engines[1 - number]
                        with self.subTest(where, apply=apply, engine=number):
                            held = version
                            version += 1
                            engine.fails = where
                            with self.assertRaisesRegex(Broken, where):
                                self.sync(trainer, version)
                            engine.fails = ""
                            if where in before:
                                for each in self.engines:
                                    self.assertEqual((each.version, each.active, each.paused), (str(held), False, False))
                            else:
                                self.check(version, other)
                                self.assertTrue(engine.paused)
                            version += 1
                            self.sync(trainer, version)
                            self.check(version)

    def test_an_update_that_fails_before_the_sync(self):
        """It is the one call that ends the fleet. The engines are as before."""
        for engine in self.engines:
            with self.trainer() as trainer:
                trainer.init()
                self.sync(trainer, 1)
                engine.fails = "update"
                self.assertRaisesRegex(Broken, "update", trainer.send_weights, 2)
                engine.fails = ""
                self.check(1)
                self.assertRaises(shardpull.Error, trainer.send_weights, 3)
                self.check(1)

    def test_a_source_that_fails(self):
        """In place the engines stay paused, also where a later call fails early; staged they go on."""
        for apply in ("inplace", "staged"):
            with self.subTest(apply), self.trainer(engine={"apply": apply}) as trainer:
                trainer.init()
                self.sync(trainer, 1)
                self.source.broken = True
                self.assertRaisesRegex(Broken, "source", self.sync, trainer, 2)
                self.source.broken = False
                self.assertEqual([engine.paused for engine in self.engines], [apply == "inplace"] * 2)
                if apply == "inplace":
                    self.assertRaisesRegex(shardpull.FailedPreconditionError, "all are to be sent", trainer.send_weights, 2, ["w"])
                    self.engines[1].fails = "start"
                    self.assertRaisesRegex(Broken, "start", self.sync, trainer, 2)
                    self.engines[1].fails = ""
                    self.assertEqual([engine.paused for engine in self.engines], [True, True])
                self.sync(trainer, 3)
                self.check(3)

    def test_one_call_at_a_time(self):
        with self.trainer() as trainer:
            trainer.init()
            self.source.go_on.clear()
            self.source.begun.clear()
            first = Background(lambda: self.sync(trainer, 1))
            self.assertTrue(self.source.begun.wait(60))
            for second in (lambda: trainer.send_weights(2), lambda: trainer.rejoin(0)):
                with self.assertRaisesRegex(shardpull.FailedPreconditionError, "while another thread's call"):
                    second()
            self.source.go_on.set()
            first.result()
            self.check(1)

    def test_an_engine_that_joins_again(self):
        """Its worker has left between two syncs: they fail, or go on without it, until it is back."""
        for loss in ("fail", "continue"):
            with self.subTest(loss), self.trainer(on_consumer_loss=loss, dead_after_ms=2000) as trainer:
                trainer.init()
                self.sync(trainer, 1)
                self.engines[1].shutdown_weight_transfer_engine()
                if loss == "fail":
                    self.assertRaisesRegex(shardpull.UnavailableError, "worker 1 is lost", self.sync, trainer, 2)
                    self.assertEqual(trainer.lost, [1])
                else:
                    self.sync(trainer, 2)
                    self.assertEqual(trainer.lost, [1])
                    self.check(2, self.engines[0])
                self.engines[1] = Engine(SIZE)
                trainer.rejoin(1, self.engines[1])
                self.assertEqual(trainer.lost, [])
                self.assertRaisesRegex(shardpull.FailedPreconditionError, "all are to be sent", trainer.send_weights, 2, ["w"])
                self.sync(trainer, 3)
                self.check(3)
                if loss == "continue":  # both leave
                    for engine in self.engines:
                        engine.shutdown_weight_transfer_engine()
                    self.assertRaisesRegex(shardpull.UnavailableError, "is lost", self.sync, trainer, 4)
                    for replica, engine in enumerate(self.engines):
                        trainer.rejoin(replica)
                    self.sync(trainer, 5)
                    self.check(5)

    def test_refusals(self):
        for what, error, call in (
            ("rank 0 drives the engines", shardpull.InvalidArgumentError, lambda: Trainer(self.source, **self.fleet())),
            ("other ranks have none", shardpull.InvalidArgumentError, lambda: Trainer(self.source, self.engines, rank=1, world_size=2, **self.fleet())),
            ("have to be told how many workers", shardpull.InvalidArgumentError, lambda: Trainer(self.source, rank=1, world_size=2, **self.fleet())),
            ("cannot be asked how many workers", shardpull.InvalidArgumentError, lambda: Trainer(self.source, object(), **self.fleet())),
        ):
            with self.subTest(what), self.assertRaisesRegex(error, what):
                call()
        with self.trainer() as trainer:
            self.assertRaisesRegex(shardpull.InvalidArgumentError, "replica is 2, of 2 engines", trainer.rejoin, 2)
            self.assertRaisesRegex(shardpull.FailedPreconditionError, "rejoin before init", trainer.rejoin, 0)
        self.engines[1].fails = "init"
        with self.trainer() as trainer:
            self.assertRaisesRegex(Broken, "init", trainer.init)


if __name__ == "__main__":
    unittest.main()

"""The trainer's side of vLLM without vLLM: engines that keep what its routes keep, and fail where they are told to."""

import json
import threading
import unittest

import numpy

from fleets import Background, FleetTest  # first: it finds the package

import shardpull

from shardpull.vllm import HTTPClient, Trainer
from shardpull.vllm._protocol import JOINED, READY, UPDATED


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
        self.active = self.paused = self.mixed = False
        self.version = None
        self.resets = 0
        self.fails = ""
        self.calls = []
        self.confused = False
        """vLLM has raised for several workers, whose answers it mixes up from then on."""
        self.late = threading.Event()
        self.late.set()

    def enter(self, what):
        self.calls.append(what)
        if self.fails == what:
            raise Broken(what)

    def refuse(self, what):
        self.confused = self.world > 1
        raise RuntimeError(what)

    def world_size(self):
        return self.world

    def is_paused(self):
        return self.paused

    def init_weight_transfer_engine(self, info):
        self.enter("init")
        self.active = False
        self.shutdown_weight_transfer_engine()
        own = {"package_version", "num_consumers", "num_replicas", "replica_rank", "ticket", "apply"}
        options = {name: value for name, value in info.items() if name not in own}
        options["apply"] = info.get("apply", "inplace")
        joining = [
            Background(lambda i=i: shardpull.Worker(shardpull.Model({"w": self.kept[i]}), consumer=info["replica_rank"] * self.world + i, **options))
            for i in range(self.world)
        ]
        self.workers = [one.result() for one in joining]
        for worker in self.workers:
            worker.send_message("trainer 0", JOINED, f"{info['ticket']} {'mixed' if self.mixed else 'whole'}")
        self.enter("after init")

    def shutdown_weight_transfer_engine(self):
        if self.active and self.workers:
            self.refuse("cannot release a trainer connection during a weight update")
        for worker in self.workers:
            worker.shutdown()
        self.workers = []

    def start_weight_update(self):
        self.enter("start")
        if self.active:
            self.refuse("already active")
        self.active = True
        self.enter("after start")

    def update_weights(self, info):
        self.enter("update")
        if not self.active:
            self.refuse("start_weight_update must be called before update_weights")
        for serving in [Background(lambda worker=worker: self.serve(worker, info)) for worker in self.workers]:
            serving.result()
        if not self.late.wait(60):
            raise Broken("nobody went on")
        self.enter("after update")

    def serve(self, worker, info):
        """Its apply is the fleet's here: what fails in place has changed weights, and staged has not."""
        outcome = []

        def ended(version, error, report):
            outcome.append((version, error))
            raise Ended

        worker.send_message("trainer 0", READY, str(info["ticket"]))
        try:
            worker.serve(ended)
        except Ended:
            pass
        error = str(outcome[0][1]) if outcome and outcome[0][1] is not None else None if outcome else "the fleet has ended"
        changed = error is not None and self.in_place and bool(outcome)
        if error is None and self.fails == "take in":
            error, changed = "take in", True
        self.mixed = changed
        try:
            worker.send_message("trainer 0", UPDATED, f"{info['ticket']} {json.dumps({'error': error, 'changed': changed})}")
        except shardpull.Error:
            pass  # the fleet has ended

    in_place = True

    def finish_weight_update(self, weight_version=None):
        self.enter("finish" if weight_version is not None else "give up")
        if not self.active:
            self.refuse("finish_weight_update called without a matching start_weight_update")
        self.active = False
        if weight_version is not None:
            self.version = weight_version

    def reset_prefix_cache(self):
        self.enter("reset")
        self.resets += 1

    def pause(self):
        self.enter("pause")
        self.paused = True

    def resume(self):
        self.enter("resume")
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

    def tearDown(self):
        self.assertFalse(any(engine.confused for engine in self.engines))

    def trainer(self, **options):
        for engine in self.engines:
            engine.in_place = options.get("engine", {}).get("apply") != "staged"
        return Trainer(self.source, self.engines, **{**self.fleet(), "dead_after_ms": 2000, **options})

    def sync(self, trainer, version):
        self.source.weights[:] = numpy.arange(SIZE, dtype="u4") * 7 + version
        return trainer.send_weights(version)

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

    def test_a_call_that_fails(self):
        """Of either engine, at each place, in place and staged: who has one version goes on, and the next sync is exact for both."""
        before, after = ("pause", "start", "after start"), ("after update", "finish", "reset", "resume", "take in")
        for apply in ("inplace", "staged"):
            with self.trainer(engine={"apply": apply}) as trainer:
                trainer.init()
                version = 1
                self.sync(trainer, version)
                for where in before + after:
                    for number in (0, 1) if where in before else (apply == "staged",):
                        engine, other = self.engines[number], self.engines[1 - number]
                        with self.subTest(where, apply=apply, engine=number):
                            held = version
                            version += 1
                            engine.fails = where
                            with self.assertRaisesRegex(Exception, where):
                                self.sync(trainer, version)
                            engine.fails = ""
                            if where in before:
                                for each in self.engines:
                                    self.assertEqual((each.version, each.active, each.paused), (str(held), False, False))
                            else:
                                self.check(version, other)
                            if where == "take in":
                                self.assertTrue(engine.paused)
                            version += 1
                            self.sync(trainer, version)
                            self.check(version)

    def test_two_workers_each(self):
        """What fails with several workers never raises in one: vLLM would mix up their answers."""
        self.engines = [Engine(SIZE, 2), Engine(SIZE, 2)]
        with self.trainer() as trainer:
            trainer.init()
            self.sync(trainer, 1)
            self.check(1)
            for version in (2, 4):
                self.source.broken = True
                self.assertRaisesRegex(Broken, "source", self.sync, trainer, version)
                self.source.broken = False
                self.assertEqual([(engine.active, engine.paused) for engine in self.engines], [(False, True)] * 2)
                self.sync(trainer, version + 1)
                self.check(version + 1)
            self.engines[1].fails = "after start"
            self.assertRaisesRegex(Broken, "after start", self.sync, trainer, 6)
            self.engines[1].fails = ""
            with self.assertRaisesRegex(shardpull.UnavailableError, "nobody knows whether it is in an update"):
                self.sync(trainer, 6)
            self.assertEqual(trainer.lost, [1])
            trainer.rejoin(1)
            self.sync(trainer, 7)
            self.check(7)

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
                self.assertRaisesRegex(shardpull.FailedPreconditionError, r"has ended \(an engine could not update: update\)", trainer.send_weights, 3)
                self.check(1)

    def test_arguments(self):
        """Wrong ones are refused before an engine hears of it."""
        with self.trainer() as trainer:
            trainer.init()
            self.sync(trainer, 1)
            for engine in self.engines:
                engine.calls.clear()
            for version, names in ((-1, None), (2**64, None), ("2", None), (2, "w"), (2, [1]), (2, ["nope"]), (2, ["w", "v*"])):
                with self.subTest(version=version, names=names), self.assertRaises(shardpull.InvalidArgumentError):
                    trainer.send_weights(version, names)
            self.assertEqual([engine.calls for engine in self.engines], [[], []])
            for names in (["w"], ["*"], []):
                trainer.send_weights(1, names)
                self.check(1)

    def test_a_source_that_fails(self):
        """In place the engines stay paused, also where a later call fails early, and for a later trainer; staged they go on."""
        for apply in ("inplace", "staged"):
            with self.subTest(apply):
                with self.trainer(engine={"apply": apply}) as trainer:
                    trainer.init()
                    self.assertRaisesRegex(shardpull.FailedPreconditionError, "all are to be sent first", trainer.send_weights, 1, ["w"])
                    self.sync(trainer, 1)
                    self.source.broken = True
                    self.assertRaisesRegex(Broken, "source", self.sync, trainer, 2)
                    self.assertEqual([(engine.active, engine.paused) for engine in self.engines], [(False, apply == "inplace")] * 2)
                    self.assertRaisesRegex(shardpull.FailedPreconditionError, "all are to be sent first", trainer.send_weights, 2, ["w"])
                    if apply == "inplace":
                        self.engines[1].fails = "start"
                        self.assertRaisesRegex(Broken, "start", self.sync, trainer, 2)
                        self.engines[1].fails = ""
                        self.assertEqual([engine.paused for engine in self.engines], [True, True])
                    self.source.broken = False
                    self.sync(trainer, 3)
                    self.check(3)
                    self.source.broken = True
                    self.assertRaisesRegex(Broken, "source", self.sync, trainer, 4)
                    self.source.broken = False
                if apply == "inplace":
                    self.engines[0].paused = False  # somebody has resumed it: its worker knows better
                with self.trainer() as trainer:
                    trainer.init()
                    self.engines[1].fails = "start"
                    self.assertRaisesRegex(Broken, "start", self.sync, trainer, 5)
                    self.engines[1].fails = ""
                    self.assertEqual([engine.paused for engine in self.engines], [apply == "inplace"] * 2)
                    self.sync(trainer, 5)
                    self.check(5)

    def test_an_engine_that_is_late(self):
        """The other is complete, and goes on. The late one is waited for by the next sync."""
        with self.trainer(timeout_s=2) as trainer:
            trainer.init()
            self.sync(trainer, 1)
            self.engines[0].late.clear()
            with self.assertRaisesRegex(shardpull.DeadlineExceededError, "engine 0: no answer to the update 2 s after"):
                self.sync(trainer, 2)
            self.check(2, self.engines[1])
            self.assertTrue(self.engines[0].paused)
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "call of engine 0 that was broken off has not returned"):
                self.sync(trainer, 3)
            self.engines[0].late.set()
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
            with self.subTest(loss), self.trainer(on_consumer_loss=loss) as trainer:
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
                with self.assertRaisesRegex(shardpull.InvalidArgumentError, "engine 1 has 2 workers"):
                    trainer.rejoin(1, Engine(SIZE, 2))
                again = self.engines[1] = Engine(SIZE)
                again.fails = "after init"
                self.assertRaisesRegex(Broken, "after init", trainer.rejoin, 1, again)
                self.assertEqual((trainer.lost, again.workers), ([1], []))
                again.fails = ""
                trainer.rejoin(1)
                self.assertEqual(trainer.lost, [])
                self.assertRaisesRegex(shardpull.FailedPreconditionError, "all are to be sent first", trainer.send_weights, 2, ["w"])
                self.sync(trainer, 3)
                self.check(3)
                trainer.rejoin(0)  # one that is well
                self.sync(trainer, 4)
                self.check(4)
                if loss == "continue":  # both leave
                    for engine in self.engines:
                        engine.shutdown_weight_transfer_engine()
                    self.assertRaisesRegex(shardpull.UnavailableError, "is lost", self.sync, trainer, 5)
                    for replica in (0, 1):
                        trainer.rejoin(replica)
                    self.sync(trainer, 6)
                    self.check(6)

    def test_refusals(self):
        for what, error, call in (
            ("rank 0 drives the engines", shardpull.InvalidArgumentError, lambda: Trainer(self.source, **self.fleet())),
            ("other ranks have none", shardpull.InvalidArgumentError, lambda: Trainer(self.source, self.engines, rank=1, world_size=2, **self.fleet())),
            ("have to be told how many workers", shardpull.InvalidArgumentError, lambda: Trainer(self.source, rank=1, world_size=2, **self.fleet())),
            ("cannot be asked how many workers", shardpull.InvalidArgumentError, lambda: Trainer(self.source, object(), **self.fleet())),
            ("there is no option 'colour'", shardpull.InvalidArgumentError, lambda: self.trainer(engine={"colour": "blue"})),
            ("base_url must begin with http", shardpull.InvalidArgumentError, lambda: HTTPClient("localhost:8000")),
            ("does the engine run there", shardpull.UnavailableError, lambda: HTTPClient("http://127.0.0.1:1").world_size()),
        ):
            with self.subTest(what), self.assertRaisesRegex(error, what):
                call()
        with self.trainer() as trainer:
            self.assertRaisesRegex(shardpull.InvalidArgumentError, "replica is 2, of 2 engines", trainer.rejoin, 2)
            self.assertRaisesRegex(shardpull.FailedPreconditionError, "rejoin before init", trainer.rejoin, 0)
            self.assertRaisesRegex(shardpull.FailedPreconditionError, "send_weights before init", trainer.send_weights, 1)
            trainer.init()
            self.assertRaisesRegex(shardpull.FailedPreconditionError, "init a second time", trainer.init)
            self.sync(trainer, 1)
            self.check(1)
        with self.trainer(num_consumers=4) as trainer:
            self.assertRaisesRegex(shardpull.InvalidArgumentError, "engine 0 has 1 workers; give 2, or none", trainer.init)
        self.engines[1].fails = "init"
        with self.trainer() as trainer:
            self.assertRaisesRegex(Broken, "init", trainer.init)
        self.assertEqual(self.engines[0].workers, [])


if __name__ == "__main__":
    unittest.main()

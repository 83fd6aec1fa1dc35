"""Syncs through the Python package, every byte compared: numpy and torch, whole and in parts, in one process and in several."""
# ctest-timeout: 300
# ctest-sanitized: yes

import gc
import json
import os
import re
import subprocess
import threading
import unittest
import unittest.mock
import weakref

from fleets import SOURCE_DIR, Background, FleetTest, code  # first: it finds the package

import numpy
import shardpull
import torch

SYNCS = 3


def fill(tensors, version):
    """Gives every tensor's logical elements the bytes of a version; returns them by name."""
    wanted = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        if isinstance(tensor, torch.Tensor):
            data = code(index, version, tensor.numel() * tensor.element_size())
            # Bytes, not numbers: any bit pattern must arrive.
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).reshape(tensor.shape))
        else:
            data = code(index, version, tensor.size * tensor.itemsize)
            tensor[...] = numpy.frombuffer(data, dtype=tensor.dtype).reshape(tensor.shape)
        wanted[name] = data
    return wanted


def logical_bytes(tensor):
    if isinstance(tensor, torch.Tensor):
        return tensor.detach().clone(memory_format=torch.contiguous_format).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return tensor.tobytes()


class InOneProcess(FleetTest):
    def run_fleet(self, sent, kept, transport="shm", trainer=(), worker=(), source=shardpull.TensorSource):
        """Sends `sent` SYNCS times and compares what arrives in `kept` after each; returns the last report."""
        fleet = self.fleet(transport)
        wanted = {}

        def train():
            with shardpull.Trainer(**fleet, **dict(trainer)) as rank:
                rank.init(source(sent))
                for version in range(1, SYNCS + 1):
                    wanted[version] = fill(sent, version)
                    report = rank.send_weights(version)
                return report

        thread = Background(train)
        arrived = []

        def on_sync(version, error, report):
            self.assertIsNone(error)
            arrived.append((version, {name: logical_bytes(tensor) for name, tensor in kept.items()}))
            self.assertEqual(engine.version(), version)

        with shardpull.Worker(shardpull.Model(kept), **fleet, **dict(worker)) as engine:
            engine.serve(on_sync)
        report = thread.result()
        self.assertEqual([version for version, _ in arrived], list(range(1, SYNCS + 1)))
        for version, tensors in arrived:
            for name, data in tensors.items():
                self.assertEqual(data, wanted[version][name], f"{name} at version {version}")
        return report

    def test_numpy(self):
        types = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"]
        sent = {f"layers.{i}.{t}": numpy.zeros((3, 5), t) for i, t in enumerate(types) if t != "?"}
        sent["scalar"] = numpy.zeros((), "f4")
        sent["empty"] = numpy.zeros((0, 4), "f4")
        for transport in ("shm", "tcp"):
            with self.subTest(transport):
                kept = {name: numpy.full_like(array, 7) for name, array in sent.items()}
                report = self.run_fleet(sent, kept, transport)
                self.assertEqual(report.version, SYNCS)
                self.assertEqual(report.workers[0].bytes_kept, sum(a.nbytes for a in sent.values()))
                self.assertIn("version 3", str(report))

    def test_torch(self):
        types = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int64]
        sent = {f"layers.{i}.{t}".replace("torch.", ""): torch.zeros(6, 8, dtype=t) for i, t in enumerate(types)}
        sent["parameter"] = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        for transport in ("shm", "tcp", "cma"):
            with self.subTest(transport):
                kept = {name: torch.ones(tensor.shape).to(tensor.dtype) for name, tensor in sent.items()}
                self.run_fleet(sent, kept, transport)

    def test_views_that_are_not_contiguous(self):
        """On both sides, and what lies between the elements of the worker's stays as it was."""
        base = torch.zeros(64, 96, dtype=torch.bfloat16)
        sent = {"a": base[::2, 1::3], "b": base[1::2, 1::3].t(), "c": torch.zeros(1, 8).expand(1, 8), "d": numpy.zeros((8, 6))[:, ::2].T}
        room = torch.full((64, 96), 3, dtype=torch.bfloat16)
        kept = {"a": room[1::2, ::3], "b": torch.zeros(32, 32, dtype=torch.bfloat16).t(), "c": torch.zeros(1, 8), "d": numpy.zeros((3, 8))}
        for path in ("auto", "packed"):
            with self.subTest(path):
                self.run_fleet(sent, kept, worker={"path": path})
        rest = torch.ones(64, 96, dtype=torch.bool)
        rest[1::2, ::3] = False
        self.assertTrue(bool((room[rest] == 3).all()))

    def test_staged(self):
        sent = {"w": numpy.zeros(1000, "u1")}
        self.run_fleet(sent, {"w": numpy.zeros(1000, "u1")}, worker={"apply": "staged"}, trainer={"integrity": "full"})

    def test_buffers_without_numpy(self):
        """What has only the buffer protocol."""
        sent, kept = bytearray(100), memoryview(bytearray(100))
        fleet = self.fleet()

        def train():
            with shardpull.Trainer(**fleet) as rank:
                rank.init(shardpull.TensorSource({"w": sent}))
                for version in (1, 2):
                    sent[:] = code(0, version, 100)
                    rank.send_weights(version)

        thread = Background(train)
        got = []
        with shardpull.Worker(shardpull.Model({"w": kept}), **fleet) as worker:
            worker.serve(lambda version, error, report: got.append(bytes(kept)))
        thread.result()
        self.assertEqual(got, [code(0, 1, 100), code(0, 2, 100)])

    def test_engine_memory(self):
        """Weights in memory of the trainer's are served in place; parameters in memory of the engine's."""
        fleet = self.fleet()
        kept = torch.frombuffer(shardpull.allocate(4096), dtype=torch.uint8)[:4000]
        wanted, got = [], []

        class InPlace(shardpull.TensorSource):
            def resident(self):
                return True

            def in_engine_memory(self):
                return True

        def train():
            with shardpull.Trainer(**fleet) as rank:
                sent = torch.frombuffer(rank.allocate(4096), dtype=torch.uint8)[:4000]
                rank.init(InPlace({"w": sent}))
                for version in (1, 2):
                    wanted.append(fill({"w": sent}, version)["w"])
                    report = rank.send_weights(version)
                return report.ranks[0].export_bytes

        thread = Background(train)
        with shardpull.Worker(shardpull.Model({"w": kept}), **fleet) as worker:
            worker.serve(lambda version, error, report: got.append(logical_bytes(kept)))
        self.assertEqual(thread.result(), 0)
        self.assertEqual(got, wanted)

    def test_some_names(self):
        fleet = self.fleet()
        sent = {"a.w": numpy.zeros(8, "u1"), "b.w": numpy.zeros(8, "u1")}
        kept = {name: numpy.zeros(8, "u1") for name in sent}

        def train():
            with shardpull.Trainer(**fleet) as rank:
                rank.init(shardpull.TensorSource(sent))
                fill(sent, 1)
                rank.send_weights(1)
                fill(sent, 2)
                rank.send_weights(2, ["a.*"])
                with self.assertRaises(ValueError) as caught:
                    rank.send_weights(3, ["c.*"])
                self.assertIn("c.*", str(caught.exception))
                rank.send_weights(4, ["a.*", "b.*"])

        thread = Background(train)
        versions, seen = [], []

        def on_sync(version, error, report):
            versions.append((worker.module_version("a"), worker.module_version("b")))
            seen.append((kept["a.w"].tobytes(), kept["b.w"].tobytes()))

        with shardpull.Worker(shardpull.Model(kept), **fleet) as worker:
            worker.serve(on_sync)
            with self.assertRaises(LookupError):
                worker.module_version("nothing")
            self.assertEqual(worker.version_guard() % 2, 0)
            self.assertIn("worker 0", worker.plan_summary())
        thread.result()
        self.assertEqual(versions, [(1, 1), (2, 1), (4, 4)])
        self.assertEqual(seen[1], (code(0, 2, 8), code(1, 1, 8)))

    def test_pieces_of_two_ranks(self):
        """A source of one's own: rows of a tensor on two ranks, for two replicas; messages beside it."""
        fleet = self.fleet()
        metadata = [shardpull.TensorMeta("w", "U8", (10, 16)), shardpull.TensorMeta("x", "U8", (4,))]

        class Rows(shardpull.WeightSource):
            def __init__(self, first, last):
                self.rows, self.rest, self.released_groups = numpy.zeros((last - first, 16), "u1"), numpy.zeros(4, "u1"), []
                self.first = first

            def metadata(self):
                return metadata

            def held_pieces(self):
                return [shardpull.Piece(0, (self.first, 0), self.rows.shape)]

            def load(self, version):
                whole = numpy.frombuffer(code(0, version, 160), "u1").reshape(10, 16)
                self.rows[...] = whole[self.first : self.first + len(self.rows)]
                self.rest[...] = numpy.frombuffer(code(1, version, 4), "u1")

            def iter_groups(self, request):
                for group in request.groups:
                    yield shardpull.GroupTensors(group, [shardpull.NamedView(0, self.rows), shardpull.NamedView(1, self.rest)])

            def released(self, group):
                self.released_groups.append(group)

        heard = threading.Event()

        def train(rank):
            source = Rows(*((0, 3) if rank == 0 else (3, 10)))
            with shardpull.Trainer(**fleet, rank=rank, world_size=2, num_consumers=2, num_replicas=2) as trainer:
                trainer.init(source)
                for version in (1, 2):
                    if rank != 0:
                        self.assertEqual(trainer.next_sync(), (version, ()))
                    source.load(version)
                    trainer.send_weights(version)
                if rank == 0:
                    message = trainer.receive_message(60_000)
                    self.assertEqual((message.sender[:6], message.topic, message.body), ("worker", "done", "2"))
                    trainer.receive_message(60_000)
                    self.assertIsNone(trainer.receive_message(0))
                    heard.set()
                heard.wait(60)  # a rank that leaves is news too
            self.assertEqual(source.released_groups, [0, 0])

        def serve(consumer):
            kept = {"w": numpy.zeros((10, 16), "u1"), "x": numpy.zeros(4, "u1")}
            got = []

            def on_sync(version, error, report):
                got.append((kept["w"].tobytes(), kept["x"].tobytes()))
                if version == 2:
                    worker.send_message("trainer 0", "done", str(version))

            with shardpull.Worker(shardpull.Model(kept), **fleet, consumer=consumer) as worker:
                worker.serve(on_sync)
            self.assertEqual(got, [(code(0, v, 160), code(1, v, 4)) for v in (1, 2)])

        threads = [Background(lambda r=r: train(r)) for r in (0, 1)] + [Background(lambda c=c: serve(c)) for c in (0, 1)]
        for thread in threads:
            thread.result()

    def test_dlpack_of_parameters(self):
        """Memory of the model's own, seen by torch and numpy; it outlives whatever names it."""
        model = shardpull.Model({"w": torch.zeros(3, 4, dtype=torch.bfloat16)})
        view = torch.from_dlpack(model.parameters()["w"])
        self.assertEqual((view.dtype, tuple(view.shape)), (torch.bfloat16, (3, 4)))
        raw = numpy.asarray(model.parameters()["w"].memory())
        raw[:] = numpy.arange(24, dtype="u1")
        gone = weakref.ref(model)
        del model
        gc.collect()
        self.assertIsNone(gone())
        self.assertEqual(logical_bytes(view), bytes(range(24)))


class Lifetimes(FleetTest):
    def test_tensors_live_as_long_as_the_engine_uses_them(self):
        """Every reference the program had is dropped while the sync runs; what arrived is right, and nothing stays afterwards."""
        fleet = self.fleet()
        alive = []

        class Fresh(shardpull.WeightSource):
            """Makes each group anew and forgets it at once, as a gather does."""

            def metadata(self):
                return [shardpull.TensorMeta(f"layers.{i}.w", "U8", (1 << 20,)) for i in range(4)]

            def iter_groups(self, request):
                for group in request.groups:
                    tensor = torch.frombuffer(bytearray(code(group, request.version, 1 << 10) * 1024), dtype=torch.uint8)
                    alive.append(weakref.ref(tensor))
                    item = shardpull.GroupTensors(group, [shardpull.NamedView(group, tensor)])
                    del tensor
                    yield item
                    del item
                    gc.collect()

        def train():
            # Above the limit nothing is copied into an export buffer: the tensors themselves are read.
            with shardpull.Trainer(**fleet, export_pack_limit_bytes=0) as trainer:
                trainer.init(Fresh())
                for version in (1, 2):
                    trainer.send_weights(version)
                    gc.collect()
                    self.assertEqual([r for r in alive if r() is not None], [])

        thread = Background(train)
        kept = {f"layers.{i}.w": torch.zeros(1 << 20, dtype=torch.uint8) for i in range(4)}
        tensors = list(kept.values())
        model = shardpull.Model(kept)
        refs = [weakref.ref(tensor) for tensor in tensors]
        got = []
        worker = shardpull.Worker(model, **fleet)
        del kept, tensors, model
        gc.collect()
        self.assertTrue(all(ref() is not None for ref in refs))

        def on_sync(version, error, report):
            gc.collect()
            got.append(all(logical_bytes(ref()) == code(i, version, 1 << 10) * 1024 for i, ref in enumerate(refs)))

        worker.serve(on_sync)
        thread.result()
        self.assertEqual(got, [True, True])
        del worker
        gc.collect()
        self.assertTrue(all(ref() is None for ref in refs), "the worker is gone, its tensors are not")

    def test_a_cycle_is_collected(self):
        fleet = self.fleet()

        class Knows(shardpull.TensorSource):
            trainer = None

        trainer = shardpull.Trainer(**{**fleet, "connect_timeout_ms": 1})
        source = Knows({"w": numpy.zeros(4, "u1")})
        source.trainer = trainer
        with self.assertRaises(TimeoutError):
            trainer.init(source)
        gone = weakref.ref(trainer)
        del trainer, source
        gc.collect()
        self.assertIsNone(gone())

    def test_shutdown_from_elsewhere(self):
        """Of another thread it ends serve(); within on_sync, when that has returned. One call at a time."""
        for within in (False, True):
            fleet = self.fleet()
            trainer = shardpull.Trainer(**fleet)

            def train(trainer=trainer):
                trainer.init(shardpull.TensorSource({"w": numpy.zeros(4, "u1")}))
                trainer.send_weights(1)

            thread = Background(train)
            model = shardpull.Model({"w": numpy.zeros(4, "u1")})
            worker = shardpull.Worker(model, **fleet)
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "another worker"):
                shardpull.Worker(model, **fleet)
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "bind of w"):
                model.parameters()["w"].bind(numpy.zeros(4, "u1"))
            synced = []
            serving = Background(lambda: worker.serve(lambda *_: (synced.append(1), within and worker.shutdown())))
            thread.result()
            if not within:
                with self.assertRaisesRegex(shardpull.FailedPreconditionError, "serve while another thread"):
                    worker.serve()
                worker.shutdown()
            serving.result()
            self.assertEqual(synced, [1])
            with self.assertRaisesRegex(shardpull.FailedPreconditionError, "after shutdown"):
                worker.serve()
            model.parameters()["w"].bind(numpy.zeros(4, "u1"))
            worker.shutdown()
            trainer.shutdown()
            trainer.shutdown()

    def test_no_sync_begins_while_serve_does_not_run(self):
        """A sync that the sender starts meanwhile waits for it, and lands then."""
        sent, kept = torch.zeros(1000), torch.full((1000,), 7.0)
        fleet = self.fleet()

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                trainer.init(shardpull.TensorSource({"w": sent}))
                started.set()
                for version in (1, 2):
                    sent.fill_(version)
                    trainer.send_weights(version)
                    over[version].set()

        started, over = threading.Event(), {1: threading.Event(), 2: threading.Event()}
        thread = Background(train)

        class Enough(Exception):
            pass

        def once(version, error, report):
            raise Enough

        with shardpull.Worker(shardpull.Model({"w": kept}), **fleet) as worker:
            self.assertTrue(started.wait(60))
            for version, before in ((1, 7.0), (2, 1.0)):
                self.assertFalse(over[version].wait(0.3))
                self.assertTrue(bool((kept == before).all()))
                with self.assertRaises(Enough):
                    worker.serve(once)
                self.assertTrue(over[version].wait(60))
                self.assertTrue(bool((kept == version).all()))
            worker.serve()
        thread.result()

    def test_what_a_source_raises_is_raised(self):
        """The program's own exception, not a copy; the sync failed for the worker too, and the next one is exact."""
        fleet = self.fleet()
        sent, kept = numpy.zeros(64, "u1"), numpy.zeros(64, "u1")
        mistake = KeyError("lost it")

        class Fails(shardpull.TensorSource):
            broken = True

            def iter_groups(self, request):
                if self.broken:
                    raise mistake
                yield from super().iter_groups(request)

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                source = Fails({"w": sent})
                trainer.init(source)
                with self.assertRaises(KeyError) as caught:
                    trainer.send_weights(1)
                self.assertIs(caught.exception, mistake)
                source.broken = False
                sent[:] = numpy.frombuffer(code(0, 2, 64), "u1")
                trainer.send_weights(2)

        thread = Background(train)
        seen = []
        with shardpull.Worker(shardpull.Model({"w": kept}), **fleet) as worker:
            worker.serve(lambda version, error, report: seen.append((version, error)))
        thread.result()
        self.assertEqual([version for version, _ in seen], [1, 2])
        self.assertIsInstance(seen[0][1], shardpull.Error)
        self.assertIn("lost it", str(seen[0][1]))
        self.assertIsNone(seen[1][1])
        self.assertEqual(kept.tobytes(), code(0, 2, 64))

    def test_what_on_sync_raises_ends_serve(self):
        fleet = self.fleet()

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                trainer.init(shardpull.TensorSource({"w": numpy.zeros(4, "u1")}))
                trainer.send_weights(1)
                trainer.send_weights(2)

        thread = Background(train)
        seen = []

        def on_sync(version, error, report):
            seen.append(version)
            if version == 1:
                raise ZeroDivisionError("mine")

        with shardpull.Worker(shardpull.Model({"w": numpy.zeros(4, "u1")}), **fleet) as worker:
            with self.assertRaises(ZeroDivisionError):
                worker.serve(on_sync)
            worker.serve(on_sync)
        thread.result()
        self.assertEqual(seen, [1, 2])

    def test_a_program_that_fails_says_why(self):
        fleet = self.fleet()

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                trainer.init(shardpull.TensorSource({"w": numpy.zeros(4, "u1")}))
                raise RuntimeError("the loss is nan")

        thread = Background(train)
        with shardpull.Worker(shardpull.Model({"w": numpy.zeros(4, "u1")}), **fleet) as worker:
            with self.assertRaisesRegex(shardpull.AbortedError, "the loss is nan") as caught:
                worker.serve()
        self.assertEqual((caught.exception.process, caught.exception.peer), ("worker 0", "trainer 0"))
        with self.assertRaisesRegex(RuntimeError, "nan"):
            thread.result()


TRAINER = """
import json, sys, numpy, shardpull
from fleets import code
options = json.loads(sys.argv[1])
with shardpull.Trainer(**options, num_consumers=2, num_replicas=2) as trainer:
    sent = {f"layers.{i}.w": numpy.zeros(5000, "u1") for i in range(3)}
    trainer.init(shardpull.TensorSource(sent))
    for version in (1, 2, 3):
        for i, tensor in enumerate(sent.values()):
            tensor[:] = numpy.frombuffer(code(i, version, 5000), "u1")
        trainer.send_weights(version)
"""
WORKER = """
import json, sys, torch, shardpull
from fleets import code
options = json.loads(sys.argv[1])
kept = {f"layers.{i}.w": torch.zeros(5000, dtype=torch.uint8) for i in range(3)}
def on_sync(version, error, report):
    assert error is None, error
    for i, tensor in enumerate(kept.values()):
        assert tensor.numpy().tobytes() == code(i, version, 5000), (version, i)
    print("exact", version)
with shardpull.Worker(shardpull.Model(kept), **options, consumer=int(sys.argv[2])) as worker:
    worker.serve(on_sync)
"""


class InSeveralProcesses(FleetTest):
    def test_numpy_to_torch(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport):
                options = json.dumps(self.fleet(transport))
                trainer = self.start(TRAINER, options)
                workers = [self.start(WORKER, options, worker) for worker in (0, 1)]
                self.finish(trainer)
                for worker in workers:
                    self.assertEqual(self.finish(worker).split(), ["exact", "1", "exact", "2", "exact", "3"])


SERVING = """
import json, sys, threading, numpy, shardpull
options = json.loads(sys.argv[1])
worker = shardpull.Worker(shardpull.Model({"w": numpy.zeros(4, "u1")}), **options)
synced = threading.Event()
threading.Thread(target=lambda: worker.serve(lambda *_: synced.set()), daemon=True).start()
synced.wait()
print("ends")
"""


class AtExit(FleetTest):
    def test_a_process_that_still_serves_ends(self):
        """A daemon thread waits without the GIL as the interpreter ends; the fleet hears a goodbye, not a loss."""
        fleet = self.fleet()
        process = self.start(SERVING, json.dumps(fleet))
        with shardpull.Trainer(**fleet) as trainer:
            trainer.init(shardpull.TensorSource({"w": numpy.zeros(4, "u1")}))
            trainer.send_weights(1)
            self.assertEqual(self.finish(process), "ends\n")


class Readme(FleetTest):
    def test_its_program_runs(self):
        code = re.search(r"```python\n(.*?)```", (SOURCE_DIR / "README.md").read_text(encoding="utf-8"), re.DOTALL).group(1)
        trains, serves = code.replace("/tmp/fleet", str(self.directory)).split("# An inference process")
        module = torch.nn.ModuleDict({"proj": torch.nn.Linear(64, 64)})
        said = []
        names = {"module": module, "print": lambda *words: said.append(" ".join(map(str, words)))}
        with unittest.mock.patch.dict(os.environ, SHARDPULL_TOKEN="00000000000005ee"):
            thread = Background(lambda: exec(trains, dict(names)))
            exec("import shardpull, torch\n#" + serves, names)
            thread.result()
        self.assertEqual(len(said), 2, said)
        self.assertIn("1 None", said)


class Models(FleetTest):
    def test_a_recording_and_a_family_keep_the_same(self):
        """`plan --save-recording` writes what the family bakes: both models get the same bytes, of two tensor-parallel workers."""
        command = os.environ["SHARDPULL_BIN"]
        model, recordings = self.directory / "model", self.directory / "worker-{worker}.jsonl"
        subprocess.run([command, "generate", "--shape", "qwen3-0.6b:tiny", "--out", model], check=True, stdout=subprocess.DEVNULL)
        words = [command, "plan", "--model", model, "--inference", "tp=2", "--save-recording", recordings]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        header, size = {}, 0
        with (model / "model.safetensors").open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        metadata = [shardpull.TensorMeta(name, of["dtype"], tuple(of["shape"])) for name, of in sorted(header.items())]
        blob = (model / "model.safetensors").read_bytes()[8 + size :]
        sent = {}
        for meta in metadata:
            data = bytearray(blob[slice(*header[meta.name]["data_offsets"])])
            sent[meta.name] = torch.frombuffer(data, dtype=torch.bfloat16).reshape(meta.shape)
        kept = []
        for make in (
            lambda c: shardpull.Model.from_config(model, c, tp=2),
            lambda c: shardpull.Model.from_recording(str(recordings).format(worker=c), list(reversed(metadata))),
        ):
            fleet = self.fleet()

            def train(fleet=fleet):
                with shardpull.Trainer(**fleet, num_consumers=2) as trainer:
                    trainer.init(shardpull.TensorSource(sent))
                    trainer.send_weights(1)

            def serve(consumer, make=make, fleet=fleet):
                keeps = make(consumer)
                with shardpull.Worker(keeps, **fleet, consumer=consumer) as worker:
                    worker.serve()
                    self.assertEqual(worker.version(), 1)
                return {name: bytes(parameter.memory()) for name, parameter in keeps.parameters().items()}

            thread = Background(train)
            workers = [Background(lambda c=c, serve=serve: serve(c)) for c in (0, 1)]
            kept.append([worker.result() for worker in workers])
            thread.result()
        self.assertEqual(kept[0], kept[1])
        self.assertNotEqual(kept[0][0], kept[0][1])
        name = "model.norm.weight"
        self.assertEqual(kept[0][0][name], logical_bytes(sent[name]))
        # tp=2 of a plain row-parallel weight: the halves of its columns.
        name = "model.layers.0.self_attn.o_proj.weight"
        half = sent[name].shape[1] // 2
        self.assertEqual([kept[0][c][name] for c in (0, 1)], [logical_bytes(sent[name][:, c * half : (c + 1) * half]) for c in (0, 1)])


if __name__ == "__main__":
    unittest.main()

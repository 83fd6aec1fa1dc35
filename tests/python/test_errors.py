"""The exception family, and everything bad that a caller can pass: an exception that names the argument, never an abort."""
# ctest-sanitized: yes

import builtins
import pickle
import re
import unittest

from fleets import SOURCE_DIR, Background, FleetTest  # first: it finds the package

import numpy
import shardpull
import torch
from shardpull import _errors

BUILT_IN = {
    "CANCELLED": "RuntimeError", "UNKNOWN": "RuntimeError", "INVALID_ARGUMENT": "ValueError", "DEADLINE_EXCEEDED": "TimeoutError",
    "NOT_FOUND": "LookupError", "ALREADY_EXISTS": "ValueError", "PERMISSION_DENIED": "PermissionError",
    "RESOURCE_EXHAUSTED": "MemoryError", "FAILED_PRECONDITION": "RuntimeError", "ABORTED": "RuntimeError", "OUT_OF_RANGE": "IndexError",
    "UNIMPLEMENTED": "NotImplementedError", "INTERNAL": "RuntimeError", "UNAVAILABLE": "ConnectionError", "DATA_LOSS": "OSError",
    "UNAUTHENTICATED": "PermissionError",
}  # fmt: skip


class Family(unittest.TestCase):
    def test_every_status_code_has_a_class(self):
        """Those of include/shardpull/status.h."""
        header = (SOURCE_DIR / "include/shardpull/status.h").read_text()
        codes = re.findall(r"^  k(\w+) = \d+,$", header.split("enum class StatusCode")[1].split("};")[0], re.MULTILINE)
        spelt = [re.sub(r"(?<!^)([A-Z])", r"_\1", name).upper() for name in codes if name != "Ok"]
        self.assertEqual(sorted(spelt), sorted(_errors.BY_CODE))
        self.assertEqual(sorted(spelt), sorted(BUILT_IN))

    def test_every_class(self):
        for code, built_in in BUILT_IN.items():
            with self.subTest(code):
                error = _errors.from_status(code, "what happened", "peer_lost", "peer", True, "worker 3", "a.w", "trainer 0")
                self.assertIs(type(error), _errors.BY_CODE[code])
                self.assertIsInstance(error, shardpull.Error)
                self.assertIsInstance(error, RuntimeError)
                self.assertIsInstance(error, getattr(builtins, built_in))
                self.assertIs(getattr(shardpull, type(error).__name__), type(error))
                for copy in (error, pickle.loads(pickle.dumps(error))):
                    self.assertEqual(str(copy), "what happened")
                    self.assertEqual(
                        (copy.code, copy.message, copy.reason, copy.fault, copy.retryable, copy.peer, copy.tensor, copy.process),
                        (code, "what happened", "peer_lost", "peer", True, "worker 3", "a.w", "trainer 0"))  # fmt: skip
        self.assertIsInstance(shardpull.InvalidTypeError("x"), TypeError)


class Arguments(FleetTest):
    def refused(self, *words, kind=shardpull.InvalidArgumentError):
        test = self

        class Refused:
            def __enter__(self):
                return self

            def __exit__(self, exc_type, error, trace):
                test.assertIsNotNone(error, f"accepted; expected a refusal with {words}")
                test.assertIsInstance(error, kind, error)
                for word in words:
                    test.assertIn(word, str(error))
                return True

        return Refused()

    def test_options(self):
        wrong_type, wrong = shardpull.InvalidTypeError, shardpull.InvalidArgumentError
        common = [
            ({"token": 0}, wrong, "token"), ({"token": -1}, wrong, "token"), ({"token": 1 << 64}, wrong, "token"),
            ({"token": "ab"}, wrong_type, "token"), ({"token": True}, wrong_type, "token"), ({"token": 1.0}, wrong_type, "token"),
            ({"directory": 3}, wrong_type, "directory"), ({"directory": ""}, wrong, "directory"),
            ({"directory": "\ud800"}, wrong, "directory"),
            ({"directory": "/nowhere/at/all"}, shardpull.FailedPreconditionError, "/nowhere/at/all"),
            ({"transport": "rdma"}, wrong, "transport"), ({"transport": 1}, wrong_type, "transport"),
            ({"connect_timeout_ms": 0}, wrong, "connect_timeout_ms"), ({"stall_timeout_ms": 0}, wrong, "stall_timeout_ms"),
            ({"heartbeat_ms": 0}, wrong, "heartbeat_ms"), ({"dead_after_ms": 1}, wrong, "dead_after_ms"),
            ({"ucx_workers": 17}, wrong, "ucx_workers"), ({"insecure_listen": 1}, wrong_type, "insecure_listen"),
            ({"rendezvous": "a:b:c"}, wrong, "rendezvous"), ({"ring_dept": 1}, wrong_type, "ring_dept"),
            ({"trace_file": "/nowhere/at/all"}, shardpull.Error, "/nowhere/at/all"),
        ]  # fmt: skip
        trainer = [
            ({"rank": 1}, wrong, "rank"), ({"world_size": 0}, wrong, "world_size"), ({"num_consumers": 0}, wrong, "num_consumers"),
            ({"num_consumers": 3, "num_replicas": 2}, wrong, "num_replicas"), ({"workers_per_replica": 7}, wrong, "workers_per_replica"),
            ({"ring_depth": 0}, wrong, "ring_depth"), ({"lookahead": -1}, wrong, "lookahead"), ({"publish": "x"}, wrong, "publish"),
            ({"on_consumer_loss": None, "integrity": "x"}, wrong, "integrity"), ({"on_consumer_loss": "x"}, wrong, "on_consumer_loss"),
            ({"presize_bytes": "1"}, wrong_type, "presize_bytes"), ({"rank": numpy.float32(0)}, wrong_type, "rank"),
        ]  # fmt: skip
        worker = [
            ({"chunk_split": 0}, wrong, "chunk_split"), ({"pull_split": 0}, wrong, "pull_split"), ({"path": "x"}, wrong, "path"),
            ({"apply": "x"}, wrong, "apply"), ({"conversions": "x"}, wrong, "conversions"), ({"consumer": -1}, wrong, "consumer"),
        ]  # fmt: skip
        for options, kind, word in common + trainer:
            with self.subTest(trainer=options), self.refused(word, kind=kind):
                shardpull.Trainer(**{**self.fleet(), **options})
        for options, kind, word in common + worker:
            with self.subTest(worker=options), self.refused(word, kind=kind):
                shardpull.Worker(shardpull.Model({"w": bytearray(4)}), **{**self.fleet(), **options})
        with self.refused("SHARDPULL_TOKEN"):
            shardpull.Trainer(directory=str(self.directory))
        shardpull.Trainer(**{**self.fleet(), "rank": numpy.int64(0)}).shutdown()

    def test_tensors(self):
        array = numpy.zeros((4, 4), "f4")
        for what, tensor, word in (
            ("negative strides", array[::-1], "negative stride"),
            ("other byte order", array.astype(">f4"), "byte order"),
            ("half elements", numpy.lib.stride_tricks.as_strided(array, (2,), (6,)), "whole elements"),
            ("strings", numpy.array(["a"]), "dtype"),
            ("objects", numpy.array([None]), "dtype"),
            ("read-only", numpy.frombuffer(b"abcd", "u1"), "read-only"),
            ("read-only bytes", b"abcd", "read-only"),
            ("a list", [1, 2], "not list"),
            ("None", None, "not NoneType"),
            ("sparse", torch.zeros(4, 4).to_sparse(), "dense"),
            ("complex128", torch.zeros(2, dtype=torch.complex128), "complex128"),
            ("lazy conjugate", torch.zeros(2, dtype=torch.complex64).conj(), "conjugate"),
            ("no memory", torch.zeros(2, device="meta"), "CPU"),
            ("quantised", torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8), "qint8"),
        ):
            with self.subTest(what), self.refused("a.w", word):
                shardpull.Model({"a.w": tensor})

    def test_models(self):
        model = shardpull.Model({"w": torch.zeros(4, dtype=torch.bfloat16)})
        parameter = model.parameters()["w"]
        with self.refused("F32", "BF16"):
            parameter.bind(torch.zeros(4))
        with self.refused("shape"):
            parameter.bind(torch.zeros(5, dtype=torch.bfloat16))
        with self.refused("strides"):
            parameter.bind(torch.zeros(8, dtype=torch.bfloat16)[::2])
        with self.refused("name", kind=shardpull.InvalidTypeError):
            shardpull.Model({1: bytearray(4)})
        with self.refused("nowhere.jsonl", kind=shardpull.NotFoundError):
            shardpull.Model.from_recording("/nowhere.jsonl", [])
        bad = self.directory / "bad.jsonl"
        bad.write_text("{}\n")
        with self.refused("bad.jsonl", kind=shardpull.Error):
            shardpull.Model.from_recording(bad, [])
        with self.refused("BF17"):
            shardpull.Model.from_recording(bad, [shardpull.TensorMeta("w", "BF17", (1,))])
        with self.refused("metadata", kind=shardpull.InvalidTypeError):
            shardpull.Model.from_recording(bad, ["w"])
        with self.refused("shape", "'w'"):
            shardpull.Model.from_recording(bad, [shardpull.TensorMeta("w", "BF16", (-1,))])
        with self.refused("/nowhere", kind=shardpull.NotFoundError):
            shardpull.Model.from_config("/nowhere", 0)

    def test_calls(self):
        with shardpull.Trainer(**self.fleet()) as trainer:
            with self.refused("before init", kind=shardpull.FailedPreconditionError):
                trainer.send_weights(1)
            with self.refused("version"):
                trainer.send_weights(-1)
            with self.refused("names", kind=shardpull.InvalidTypeError):
                trainer.send_weights(1, "layers.*")
            with self.refused("next_sync", kind=shardpull.FailedPreconditionError):
                trainer.next_sync()
            with self.refused("timeout_ms"):
                trainer.receive_message(-1)
            for call, word in (
                (lambda: trainer.send_message(None, "", ""), "to must be"), (lambda: trainer.send_message("worker 0", 1, ""), "topic"),
                (lambda: trainer.allocate(None), "bytes"), (lambda: trainer.allocate(1, None), "what"),
                (lambda: trainer.init(None), "source"),
                (lambda: trainer.send_weights(None), "version"), (lambda: shardpull.Worker(None), "model"),
                (lambda: shardpull.Model(None), "tensors"),
                (lambda: shardpull.TensorSource(3), "tensors"), (lambda: shardpull.TensorSource({"w": None}), "'w'"),
                (lambda: shardpull.Model.from_config("/nowhere", "0"), "consumer"),
                (lambda: shardpull.Model.from_config(None, 0), "config"),
                (lambda: shardpull.Model.from_config("/nowhere", 0, tp=None), "tp"), (lambda: trainer.shutdown(3), "reason"),
                (lambda: shardpull.gather_groups(None), "metadata"), (lambda: shardpull.allocate("1"), "bytes"),
            ):  # fmt: skip
                with self.subTest(word), self.refused(word, kind=shardpull.InvalidTypeError):
                    call()
            with self.refused("'nobody'"):
                trainer.send_message("nobody", "", "")
            with self.refused("weights", kind=shardpull.ResourceExhaustedError):
                trainer.allocate(1 << 60)

            class Wrong(shardpull.TensorSource):
                def metadata(self):
                    return [shardpull.TensorMeta("w", "NOPE", (4,))]

            with self.refused("NOPE"):
                trainer.init(Wrong({"w": bytearray(4)}))
        with self.refused("after shutdown", kind=shardpull.FailedPreconditionError):
            trainer.send_weights(1)

    def test_what_a_source_gives(self):
        """Of another dtype, shape or group than it said: the sync fails on both sides, naming the tensor, and the next one works."""
        fleet = self.fleet()
        kept = {"a.w": numpy.zeros(4, "f4")}
        wrong = [numpy.zeros(4, "f8"), numpy.zeros(5, "f4"), numpy.zeros(4, "f4")[::-1], None, [1, 2, 3, 4]]

        def train():
            with shardpull.Trainer(**fleet) as trainer:
                sent = {"a.w": numpy.ones(4, "f4")}
                source = shardpull.TensorSource(sent)
                trainer.init(source)
                for version, tensor in enumerate(wrong, 1):
                    sent["a.w"] = tensor
                    with self.refused("a.w"):
                        trainer.send_weights(version)
                sent["a.w"] = numpy.ones(4, "f4")
                trainer.send_weights(9)

        thread = Background(train)
        seen = []
        with shardpull.Worker(shardpull.Model(kept), **fleet) as worker:
            worker.serve(lambda version, error, report: seen.append((version, error is None)))
        thread.result()
        self.assertEqual(seen, [(version, False) for version in range(1, len(wrong) + 1)] + [(9, True)])
        self.assertEqual(kept["a.w"].tolist(), [1, 1, 1, 1])

    def test_sides_that_do_not_agree(self):
        """Another token, and a worker that keeps what the trainers do not have."""
        fleet = {**self.fleet(), "connect_timeout_ms": 20_000}
        trainer = shardpull.Trainer(**fleet)
        starting = Background(lambda: trainer.init(shardpull.TensorSource({"w": bytearray(4)})))
        with self.refused("token", kind=shardpull.UnauthenticatedError):
            shardpull.Worker(shardpull.Model({"w": bytearray(4)}), **{**fleet, "token": fleet["token"] ^ 1})
        with self.refused("other", kind=shardpull.Error):
            shardpull.Worker(shardpull.Model({"other": bytearray(4)}), **fleet)
        with self.refused("other", kind=shardpull.Error):
            starting.result()
        trainer.shutdown()


if __name__ == "__main__":
    unittest.main()

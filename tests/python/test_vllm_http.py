"""Servers of vLLM's, started as docs/guides/vllm.md says: several, requests that run as a sync begins, workers that die."""
# ctest-timeout: 1200
# ctest-processors: 2

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

from fleets import SOURCE_DIR, Background, FleetTest  # first: it finds the package

import shardpull
import vllm_models
from vllm_engines import PROMPTS, Source, answers, started

from shardpull.vllm import HTTPClient, Trainer

START_S = 300
MODEL = "qwen3"
LONG = 1000

GUIDE = (SOURCE_DIR / "docs" / "guides" / "vllm.md").read_text(encoding="utf-8")
[SETTINGS] = re.findall(r"(?m)^\$ export (VLLM_SERVER_DEV_MODE=.*)$", GUIDE)
[COMMAND] = re.findall(r"(?m)^\$ python (-m vllm\.entrypoints\..*)$", GUIDE)


class Server:
    """The guide's server, of a version of the model, in processes of its own."""

    def __init__(self, version, directory, *flags):
        path = vllm_models.write(MODEL, pathlib.Path(directory) / MODEL, vllm_models.weights_of(MODEL, version))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [
            sys.executable, "-W", "ignore", *(path if word == "DIR" else word for word in shlex.split(COMMAND)),
            "--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self._port),
            "--skip-tokenizer-init", "--max-model-len", "2048", "--max-num-seqs", "4",
            "--hf-overrides", json.dumps({"max_position_embeddings": 2048}), "--enable-scale-out", *flags,
        ]  # fmt: skip
        settings = dict(word.split("=", 1) for word in shlex.split(SETTINGS))
        self._environment = {**os.environ, **settings, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "1"}
        self._log = open(pathlib.Path(directory) / "server.log", "a+")
        self._process = None

    def start(self):
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
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

    def generate(self, prompt, count):
        """Yields what each step brings, (tokens, reason why it is over or None), as it comes."""
        body = {
            "token_ids": prompt, "model": "m", "stream": True,
            "sampling_params": {"temperature": 0, "max_tokens": count, "ignore_eos": True, "detokenize": False},
        }  # fmt: skip
        request = urllib.request.Request(f"{self.url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                for line in response:
                    said = line.decode().removeprefix("data: ").strip()
                    if said and said != "[DONE]":
                        for choice in json.loads(said)["choices"]:
                            yield choice["token_ids"] or [], choice["finish_reason"]
        except OSError as error:
            raise AssertionError(f"{error}:\n{self.log()}") from error

    def tokens(self, count=12, prompts=PROMPTS):
        return [[token for tokens, _ in self.generate(prompt, count) for token in tokens] for prompt in prompts]

    def kill(self):
        """All its processes, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self):
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self.kill()


class Request:
    """A long one. It runs once its first token has come."""

    def __init__(self, server):
        self._running = threading.Event()
        self._server = server
        self._all = Background(lambda: self._read(server))

    def _read(self, server):
        tokens, reason = [], None
        for some, reason in server.generate(PROMPTS[0], LONG):
            tokens += some
            self._running.set()
        return tokens, reason

    def wait(self):
        if not self._running.wait(60):
            raise AssertionError(f"no token came:\n{self._server.log()}")

    def result(self):
        return self._all.result()


class Servers(FleetTest):
    """Two servers through all of it: after each test both answer as ones that started on version 0 do."""

    maxDiff = None

    @classmethod
    def setUpClass(cls):
        cls.stack = contextlib.ExitStack()
        cls.addClassCleanup(cls.stack.close)
        cls.servers = []
        for _ in range(2):
            server = Server(0, cls.stack.enter_context(tempfile.TemporaryDirectory(prefix="shardpull-vllm-")))
            cls.stack.callback(server.stop)
            server.start()
            cls.servers.append(server)
        with started(MODEL, 1, dtype="float32") as llm:  # the guide's
            cls.fresh_1 = [[token for token, _ in answer] for answer in answers(llm)]
        for server in cls.servers:
            server.wait()
        cls.fresh_0, cls.long_0 = cls.servers[0].tokens(), cls.servers[0].tokens(LONG, PROMPTS[:1])[0]

    def setUp(self):
        super().setUp()
        self.assertNotEqual(self.fresh_0, self.fresh_1)
        self.clients = [HTTPClient(server.url) for server in self.servers]
        self.source = Source(MODEL, 0)

    def trainer(self, transport="shm", **options):
        return Trainer(self.source, self.clients, **self.fleet(transport), **options)

    def answer(self, *wanted):
        self.assertEqual([server.tokens() for server in self.servers], list(wanted))

    def back(self, trainer):
        self.source.step(0)
        self.source.before_group = None
        trainer.send_weights(0)
        self.answer(self.fresh_0, self.fresh_0)

    def test_two_engines(self):
        """Over shared memory, and as on another host: by rendezvous and TCP."""
        for transport in ("shm", "tcp"):
            with self.subTest(transport), self.trainer(transport) as trainer:
                trainer.init()
                for version in (1, 0, 1):
                    self.source.step(version)
                    report = trainer.send_weights(version + 10)
                    self.assertEqual(len(report.workers), 2)
                    self.answer(*[self.fresh_1 if version else self.fresh_0] * 2)
                    self.assertEqual([client.weight_version() for client in self.clients], [str(version + 10)] * 2)
                self.back(trainer)
        with self.assertRaisesRegex(shardpull.FailedPreconditionError, "start_weight_update: 500"):
            self.clients[0].start_weight_update()  # the fleet has ended

    def test_data_parallel(self):
        """An engine of two workers that have the same weights: its requests go to either."""
        server = Server(0, self.directory, "--data-parallel-size", "2")
        self.addCleanup(server.stop)
        server.start()
        server.wait()
        with Trainer(self.source, HTTPClient(server.url), **self.fleet()) as trainer:
            trainer.init()
            for version in (1, 0):
                self.source.step(version)
                self.assertEqual(len(trainer.send_weights(version).workers), 2)
                for _ in range(2):
                    self.assertEqual(server.tokens(), self.fresh_1 if version else self.fresh_0)

    def test_requests_that_run_as_a_sync_begins(self):
        for mode in ("abort", "wait", "keep"):
            with self.subTest(mode):
                self.clients = [HTTPClient(server.url, pause_mode=mode) for server in self.servers]
                with self.trainer() as trainer:
                    trainer.init()
                    self.source.step(1)
                    requests = [Request(server) for server in self.servers]
                    for request in requests:
                        request.wait()
                    trainer.send_weights(1)
                    self.answer(self.fresh_1, self.fresh_1)
                    for request in requests:
                        tokens, reason = request.result()
                        same = next((i for i, (a, b) in enumerate(zip(tokens, self.long_0, strict=False)) if a != b), len(tokens))
                        if mode == "abort":
                            self.assertEqual((reason, tokens), ("abort", self.long_0[: len(tokens)]))
                            self.assertLess(len(tokens), LONG)
                        elif mode == "wait":
                            self.assertEqual((reason, tokens), ("length", self.long_0))
                        else:
                            self.assertEqual((reason, len(tokens)), ("length", LONG))
                            self.assertLess(same, LONG)  # the rest is the new weights'
                            self.assertGreater(same, 0)
                    self.back(trainer)

    def test_an_engine_that_cannot_be_paused(self):
        """Nothing has changed, the other goes on, and the next call is the sync."""

        class Busy(HTTPClient):
            broken = True

            def pause(self):
                if self.broken:
                    raise OSError("not now")
                super().pause()

        self.clients[1] = Busy(self.servers[1].url)
        with self.trainer() as trainer:
            trainer.init()
            self.source.step(1)
            with self.assertRaisesRegex(OSError, "not now"):
                trainer.send_weights(1)
            self.answer(self.fresh_0, self.fresh_0)
            self.clients[1].broken = False
            trainer.send_weights(1)
            self.answer(self.fresh_1, self.fresh_1)
            self.back(trainer)

    def killing(self, number):
        """The second server dies as the third group is about to be published."""
        if number == 2:
            self.servers[1].kill()

    def restart(self):
        self.servers[1].start()
        self.servers[1].wait()

    def test_an_engine_that_dies_fails_the_sync(self):
        """The one that is left is paused, as parts of it may be new; with the other back the next sync brings all."""
        with self.trainer() as trainer:
            trainer.init()
            self.source.step(1)
            self.source.before_group = self.killing
            with self.assertRaisesRegex(shardpull.UnavailableError, "worker 1 is lost"):
                trainer.send_weights(1)
            self.assertEqual(trainer.lost, [1])
            self.source.before_group = None
            with self.assertRaisesRegex(shardpull.UnavailableError, "worker 1 is lost"):
                trainer.send_weights(1)
            self.restart()
            trainer.rejoin(1)
            self.assertEqual(trainer.lost, [])
            trainer.send_weights(1)
            self.answer(self.fresh_1, self.fresh_1)
            self.back(trainer)

    def test_the_others_go_on_without_it(self):
        with self.trainer(on_consumer_loss="continue", engine={"apply": "staged"}) as trainer:
            trainer.init()
            self.source.step(1)
            self.source.before_group = self.killing
            self.assertEqual(trainer.send_weights(1).lost_consumers, [1])
            self.source.before_group = None
            self.assertEqual(trainer.lost, [1])
            self.assertEqual(self.servers[0].tokens(), self.fresh_1)
            self.source.step(0)
            trainer.send_weights(2)
            self.assertEqual(self.servers[0].tokens(), self.fresh_0)
            self.restart()
            trainer.rejoin(1)
            self.source.step(1)
            self.assertEqual(len(trainer.send_weights(3).workers), 2)
            self.answer(self.fresh_1, self.fresh_1)
            self.servers[1].kill()  # between two syncs
            self.source.step(0)
            trainer.send_weights(4)
            self.assertEqual(self.servers[0].tokens(), self.fresh_0)
            self.restart()
            trainer.rejoin(1)
            self.back(trainer)


if __name__ == "__main__":
    unittest.main()

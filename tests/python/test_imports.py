"""In one process with torch, grpcio, vLLM and Ray, whose own copies of gRPC, protobuf and others must not meet ours: any order."""
# ctest-timeout: 300

import itertools
import json
import subprocess
import sys
import unittest

from fleets import FleetTest

SCRIPT = """
import json, sys
names = sys.argv[2].split(",")
for name in names:
    __import__(name)
import shardpull
from fleets import Background
options = json.loads(sys.argv[1])
server = None
if "grpc" in names:
    import concurrent.futures, grpc
    def echo():
        '''A call through grpcio's own gRPC.'''
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("e.E", {
            "Say": grpc.unary_unary_rpc_method_handler(lambda request, context: request)}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert channel.unary_unary("/e.E/Say")(b"hello", timeout=60) == b"hello"
        server.stop(None).wait()
else:
    echo = lambda: None
if "ray" in names:
    import ray
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    twice = ray.remote(lambda x: 2 * x)
    assert ray.get(twice.remote(21), timeout=60) == 42
if "vllm" in names:
    from vllm.config import VllmConfig
if "torch" in names or "vllm" in names:
    import torch
    sent, kept = torch.arange(64.0).reshape(8, 8), torch.zeros(8, 8)
    same = lambda: torch.equal(sent, kept) and bool((sent @ sent).sum() > 0)
else:
    sent, kept = bytearray(range(64)), bytearray(64)
    same = lambda: sent == kept
def train():
    with shardpull.Trainer(**options) as trainer:
        trainer.init(shardpull.TensorSource({"w": sent}))
        echo()
        trainer.send_weights(1)
thread = Background(train)
with shardpull.Worker(shardpull.Model({"w": kept}), **options) as worker:
    worker.serve(lambda version, error, report: (echo(), print("exact", same())))
thread.result()
echo()
if "ray" in names:
    assert ray.get(twice.remote(4), timeout=60) == 8
    ray.shutdown()
"""


class Imports(FleetTest):
    def test_orders(self):
        for order in [*itertools.permutations(("shardpull", "torch", "grpc")), ("shardpull",)]:
            with self.subTest(order):
                out = self.finish(self.start(SCRIPT, json.dumps(self.fleet("tcp" if order[0] == "torch" else "shm")), ",".join(order)))
                self.assertEqual(out.split(), ["exact", "True"])

    def test_orders_with_vllm_and_ray(self):
        names = ("shardpull", "vllm", "ray", "grpc")
        for order in (names[turn:] + names[:turn] for turn in range(len(names))):
            with self.subTest(order):
                environment = {"VLLM_LOGGING_LEVEL": "ERROR", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
                out = self.finish(self.start(SCRIPT, json.dumps(self.fleet()), ",".join(order), environment=environment))
                self.assertEqual(out.split()[-2:], ["exact", "True"])

    def test_nothing_else_is_imported(self):
        """Neither torch nor numpy, until a program does."""
        script = "import sys, shardpull.sources, shardpull.views; print([m for m in ('torch', 'numpy', 'grpc') if m in sys.modules])"
        self.assertEqual(self.finish(self.start(script)).strip(), "[]")

    def test_what_is_linked(self):
        """The system's gRPC, dynamically; nothing of torch."""
        from shardpull import _native

        lines = subprocess.run(["ldd", _native.__file__], check=True, capture_output=True, text=True).stdout.splitlines()
        needed = " ".join(line.split()[0] for line in lines)  # without the addresses
        self.assertIn("libgrpc++.so", needed)
        for name in ("libtorch", "libc10", "libpython"):
            self.assertNotIn(name, needed)
        self.assertEqual([line for line in lines if "not found" in line], [])
        self.assertNotIn("torch", sys.modules)


if __name__ == "__main__":
    unittest.main()

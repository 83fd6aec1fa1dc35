"""Ctrl-C in every wait: KeyboardInterrupt comes at once, and what is left can go on or end.

The signal is sent once the process has said that it is about to wait and its main thread sleeps.
"""
# ctest-sanitized: yes

import json
import pathlib
import signal
import time
import unittest

from fleets import FleetTest

LIMIT_S = 20  # of what takes less than a second on an idle host; every wait here would last a minute or for ever

PRELUDE = """
import json, os, sys, numpy, shardpull
from fleets import Background
options = json.loads(sys.argv[1])
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once: two threads talk
def model(size=4):
    return shardpull.Model({"w": numpy.zeros(size, "u1")})
class Source(shardpull.TensorSource):
    tells = False  # as the sync has begun
    def __init__(self):
        super().__init__({"w": numpy.zeros(4, "u1")})
    def iter_groups(self, request):
        if self.tells:
            self.tells = False
            say("waiting")
        yield from super().iter_groups(request)
source = Source()
def interrupted(call):
    try:
        if not source.tells:
            say("waiting")
        call()
    except KeyboardInterrupt:
        say("interrupted")
    else:
        say("returned")
"""

CASES = {
    "a worker without a sender": "interrupted(lambda: shardpull.Worker(model(), **options))",
    "a rank without a sender": """
trainer = shardpull.Trainer(**options, rank=1, world_size=2)
interrupted(lambda: trainer.init(source))
""",
    "a sender without workers": """
trainer = shardpull.Trainer(**options)
interrupted(lambda: trainer.init(source))
""",
    "a message": """
trainer = shardpull.Trainer(**options)
worker = Background(lambda: shardpull.Worker(model(), **options).serve())
trainer.init(source)
interrupted(lambda: trainer.receive_message(10**6))
trainer.send_weights(1)
trainer.shutdown()
worker.result()
""",
    "serve": """
trainer = shardpull.Trainer(**options)
ready = Background(lambda: trainer.init(source))
worker = shardpull.Worker(model(), **options)
ready.result()
interrupted(worker.serve)
sync = Background(lambda: (trainer.send_weights(1), trainer.shutdown()))
worker.serve(lambda version, error, report: say("version", version))
sync.result()
""",
    "next_sync": """
first = shardpull.Trainer(**options, world_size=2)
ready = Background(lambda: first.init(source))
worker = Background(lambda: shardpull.Worker(model(), **options).serve())
rank = shardpull.Trainer(**options, rank=1, world_size=2)
rank.init(Source())
ready.result()
interrupted(rank.next_sync)
sync = Background(lambda: (first.send_weights(1), first.shutdown()))
say("version", rank.next_sync().version)
rank.send_weights(1)
sync.result()
worker.result()
""",
    # The other rank never comes to the sync.
    "a sync that waits for a rank": """
first = shardpull.Trainer(**options, world_size=2)
second = Background(lambda: (rank := shardpull.Trainer(**options, rank=1, world_size=2), rank.init(Source()))[0])
worker = Background(lambda: shardpull.Worker(model(), **options).serve(lambda v, e, r: say("worker", v, e is None)))
first.init(source)
rank = second.result()
source.tells = True
interrupted(lambda: first.send_weights(1))
try:
    rank.send_weights(1)
except shardpull.Error as error:
    say("failed", "KeyboardInterrupt" in str(error) or repr(error))
again = Background(lambda: rank.send_weights(2))
first.send_weights(2)
again.result()
first.shutdown()
worker.result()
""",
    "a rank whose sender opens no sync": """
first = shardpull.Trainer(**options, world_size=2)
ready = Background(lambda: first.init(source))
worker = Background(lambda: shardpull.Worker(model(), **options).serve())
rank = shardpull.Trainer(**options, rank=1, world_size=2)
rank.init(Source())
ready.result()
interrupted(lambda: rank.send_weights(1))
sync = Background(lambda: (first.send_weights(1), first.shutdown()))
rank.send_weights(1)
sync.result()
worker.result()
""",
    "a sync whose worker is busy": """
import threading
trainer = shardpull.Trainer(**options)
ready = Background(lambda: trainer.init(source))
worker = shardpull.Worker(model(), **options)
ready.result()
busy, go = threading.Event(), threading.Event()
def on_sync(version, error, report):
    say("worker", version, error is None)
    if version == 1:
        busy.set()
        go.wait()
serving = Background(lambda: worker.serve(on_sync))
trainer.send_weights(1)
busy.wait()
source.tells = True
interrupted(lambda: trainer.send_weights(2))
go.set()
trainer.send_weights(3)
trainer.shutdown()
serving.result()
""",
    # In the Python code of a callback; whoever raises there is heard.
    "a source": """
import time
class Slow(Source):
    slow = True
    def iter_groups(self, request):
        while self.slow:
            if self.slow is True:
                say("waiting")
                self.slow = 1
            time.sleep(0.01)
        yield from super().iter_groups(request)
trainer = shardpull.Trainer(**options)
worker = Background(lambda: shardpull.Worker(model(), **options).serve(lambda v, e, r: say("worker", v, e is None)))
source = Slow()
trainer.init(source)
try:
    trainer.send_weights(1)
except KeyboardInterrupt:
    say("interrupted")
source.slow = False
trainer.send_weights(2)
trainer.shutdown()
worker.result()
""",
}
AFTERWARDS = {
    "serve": ["version 1"],
    "next_sync": ["version 1"],
    "a sync that waits for a rank": ["failed True", "worker 1 False", "worker 2 True"],
    "a sync whose worker is busy": ["worker 1 True", "worker 2 False", "worker 3 True"],
    "a source": ["worker 1 False", "worker 2 True"],
}


class Interrupts(FleetTest):
    def check(self, name):
        process = self.start(PRELUDE + CASES[name], json.dumps(self.fleet()))
        lines = []
        while "waiting\n" not in lines:
            line = process.stdout.readline()
            if not line:
                self.fail(f"{''.join(lines)}\n{process.communicate()[1]}")
            lines.append(line)
        begin = time.monotonic()
        while pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            self.assertLess(time.monotonic() - begin, LIMIT_S)
        process.send_signal(signal.SIGINT)
        while "interrupted\n" not in lines:
            line = process.stdout.readline()
            if not line:
                self.fail(f"{''.join(lines)}\n{process.communicate()[1]}")
            lines.append(line)
        self.assertLess(time.monotonic() - begin, LIMIT_S)
        out = "".join(lines) + process.stdout.read()
        self.finish(process)
        said = [line for line in out.splitlines() if line not in ("waiting", "interrupted")]
        self.assertEqual(sorted(said), AFTERWARDS.get(name, []), out)


for case in CASES:
    setattr(Interrupts, "test_" + case.replace(" ", "_"), lambda self, case=case: self.check(case))


if __name__ == "__main__":
    unittest.main()

"""Traces of real syncs: one file for the fleet, in which the phases of every process add up and clocks agree, whatever
became of the sync."""

# ctest-timeout: 300

import collections
import json
import math
import os
import signal
import unittest

from fault_testing import DEAD_AFTER, FaultTest
from fleet_testing import FleetTest, SLOWNESS

# Rounding of the trace's microseconds.
ROUND = 0.002


def unique(pairs):
    """A JSON object; a key that comes twice is an error, not the last one's value."""
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"twice: {keys}"
    return dict(pairs)


def not_json(word):
    raise AssertionError(f"{word} is no JSON")


# The keys of each kind of event that a trace of ours has: all of them, and no others.
KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "i": {"name", "ph", "ts", "pid", "tid", "s"},
}
METADATA = {"process_name": ("name", str), "process_sort_index": ("sort_index", int), "thread_name": ("name", str)}


def check_format(trace):
    """The rules of the Trace Event Format, as strict as its readers are lenient."""
    assert set(trace) == {"displayTimeUnit", "traceEvents"} and trace["displayTimeUnit"] in ("ms", "ns"), trace.keys()
    named, used = set(), set()
    for event in trace["traceEvents"]:
        kind = event.get("ph")
        assert kind in KEYS, event  # no begin without its end, no flow at all
        assert set(event) == KEYS[kind], event
        assert isinstance(event["name"], str) and event["name"], event
        for number in ("pid", "tid"):
            assert type(event[number]) is int and 0 <= event[number] < 2**31, event
        for time in {"ts", "dur"} & set(event):
            assert type(event[time]) in (int, float) and math.isfinite(event[time]) and event[time] >= 0, event
        if kind == "M":
            key, of = METADATA[event["name"]]
            assert set(event["args"]) == {key} and type(event["args"][key]) is of, event
            # A thread may be named once a sync, the same each time: readers take the last name for all of it.
            named.add((event["name"], event["pid"], event["tid"], event["args"][key]))
        elif kind == "i":
            assert event["s"] in ("g", "p", "t"), event
        else:
            assert isinstance(event["cat"], str) and event["cat"], event
            assert isinstance(event["args"], dict), event
            used.add((event["pid"], event["tid"]))
    names = [name[:3] for name in named]
    assert len(names) == len(set(names)), "two names of one process or thread"
    for pid, tid in used:
        assert ("process_name", pid, 0) in names and ("thread_name", pid, tid) in names, (pid, tid)
    processes = [name[3] for name in named if name[0] == "process_name"]
    assert len(processes) == len(set(processes)), processes


def complete_events(path):
    trace = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=not_json)
    check_format(trace)
    return trace["traceEvents"], [event for event in trace["traceEvents"] if event["ph"] == "X"]


class TraceChecks:
    def processes_of(self, events):
        return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}

    def assert_nests(self, complete):
        """On every thread an event lies within or beside every other."""
        threads = collections.defaultdict(list)
        for event in complete:
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        for thread, spans in threads.items():
            open_spans = []
            for begin, end, name in sorted(spans, key=lambda span: span[0]):
                while open_spans and open_spans[-1][1] <= begin + ROUND:
                    open_spans.pop()
                if open_spans:
                    self.assertLessEqual(end, open_spans[-1][1] + ROUND, f"{thread}: {name} in {open_spans[-1][2]}")
                open_spans.append((begin, end, name))

    def assert_adds_up(self, complete, pid, windows):
        """What is charged within the windows adds up to them within 1 %, without a gap or an overlap."""
        charged = sorted((event["ts"], event["dur"]) for event in complete if event["pid"] == pid and event["cat"] == "charged")
        for before, after in zip(charged, charged[1:]):
            self.assertLessEqual(sum(before), after[0] + ROUND)
        for begin, end in windows:
            inside = sum(dur for ts, dur in charged if begin - ROUND <= ts and ts + dur <= end + ROUND)
            self.assertAlmostEqual(inside, end - begin, delta=0.01 * (end - begin) + ROUND)

    def assert_clocks_agree(self, complete, names, syncs):
        """No answer comes before its pull, beyond what the trace says that clocks may be off. Returns the answers compared."""
        by_sync = collections.defaultdict(dict)  # pid -> sync -> (begin, end, error)
        for event in complete:
            if event["cat"] == "sync":
                self.assertIsNotNone(event["args"]["clock_error_us"], names[event["pid"]])
                by_sync[event["pid"]][event["args"]["sync"]] = (event["ts"], event["ts"] + event["dur"], event["args"]["clock_error_us"])
        pids = {name: pid for pid, name in names.items()}

        def sync_of(event):  # by its end: a pull may come before a rank has come to the sync
            at = event["ts"] + event["dur"]
            return next((s for s, (begin, end, _) in by_sync[event["pid"]].items() if begin - ROUND <= at <= end + ROUND), None)

        served = {}
        for event in complete:
            if event["name"] == "serve":
                key = (sync_of(event), event["pid"], event["args"]["worker"], event["args"]["chunk"], event["args"]["run"])
                served[key] = (event["ts"], event["ts"] + event["dur"])
        compared = 0
        for event in complete:
            if event["cat"] != "phase" or event["name"] != "produce wait":
                continue
            sync = sync_of(event)
            trainer = pids[f"trainer {event['args']['trainer']}"]
            worker = int(names[event["pid"]].split()[1])
            begin, end = served[sync, trainer, worker, event["args"]["chunk"], event["args"]["run"]]
            off = by_sync[trainer][sync][2] + by_sync[event["pid"]][sync][2] + ROUND
            self.assertLessEqual(event["ts"], begin + off, "a pull came before it was sent")
            self.assertLessEqual(end, event["ts"] + event["dur"] + off, "an answer came before it was sent")
            compared += 1
        self.assertEqual(len(syncs), len(by_sync[pids["trainer 0"]]))
        return compared

    def assert_all_add_up(self, complete, names):
        """Of every process, sync by sync. Returns the events of the syncs by (process, sync)."""
        syncs = {}
        for pid, name in names.items():
            mine = [event for event in complete if event["pid"] == pid]
            kind = "window" if name.startswith("worker") else "sync"
            windows = [(event["ts"], event["ts"] + event["dur"]) for event in mine if event["cat"] == kind]
            self.assert_adds_up(complete, pid, windows)
            for sync in (event for event in mine if event["cat"] == "sync"):
                end = sync["ts"] + sync["dur"]
                charged = collections.Counter()
                for event in mine:
                    if event["cat"] == "charged" and sync["ts"] - ROUND <= event["ts"] and event["ts"] + event["dur"] <= end + ROUND:
                        charged[event["name"]] += event["dur"]
                for phase, times in sync["args"]["phases"].items():
                    self.assertAlmostEqual(charged[phase], times["charged_us"], delta=0.01 * sync["dur"] + ROUND, msg=f"{name}: {phase}")
                syncs[name, sync["args"]["sync"]] = sync
        return syncs


class Trace(TraceChecks, FleetTest):
    def test_phases_of_every_process_add_up(self):
        """Every path: the trace and the report say where all time and all bytes went."""
        model = self.generate("qwen3-8b:tiny", "--vocab", "2048")
        for flags, path in ((("--path", "packed"), "packed"), (("--path", "mapped"), "mapped"),
                            (("--transport", "cma", "--path", "direct", "--export-pack-limit", "0"), "direct")):
            with self.subTest(path):
                trace = self.directory / f"{path}.json"
                outcome = self.run_command("sync", "--model", model, "--trainer", "pp=2", "--inference", "tp=2", "--syncs", 3, *flags,
                                           "--trace", trace, "--verify", "--json")
                report = self.assert_exact(outcome, 3)
                events, complete = complete_events(trace)
                names = self.processes_of(events)
                self.assertEqual(sorted(names.values()), ["trainer 0", "trainer 1", "worker 0", "worker 1"])
                self.assert_nests(complete)
                self.assertGreater(self.assert_clocks_agree(complete, names, report["syncs"]), 0)
                self.assertEqual(len(self.assert_all_add_up(complete, names)), 3 * len(names))
                windows = collections.Counter(names[event["pid"]] for event in complete if event["cat"] == "window")
                self.assertEqual(windows, {"worker 0": 6, "worker 1": 6})
                moved = sum(event["args"].get("bytes", 0) for event in complete if event["cat"] == "phase" and event["name"] == "transfer")
                self.assertEqual(moved, sum(sync["bytes_moved"] for sync in report["syncs"]))
                self.assertIn(path, {event["args"].get("path") for event in complete if event["name"] == "transfer"})
                for sync in report["syncs"]:
                    for worker in sync["workers"]:
                        charged = sum(phase["charged_s"] for phase in worker["phases"].values())
                        self.assertAlmostEqual(charged, worker["update_s"] + worker["commit_s"], delta=1e-8)
                    for rank in sync["ranks"]:
                        self.assertAlmostEqual(sum(phase["charged_s"] for phase in rank["phases"].values()), rank["wall_s"], delta=1e-8)
                waits = [event for event in complete if event["cat"] == "charged" and event["name"] == "produce wait"]
                for event in waits:
                    self.assertRegex(event["args"]["cause"], r"^trainer [01]")
        self.assert_nothing_left()

    def test_every_sync_ends_in_a_line(self):
        """Wall, bytes, rate, the slowest worker with its own, and what took most of its time, traced or not."""
        outcome = self.run_command("sync", "--shape", "qwen3-0.6b:tiny", "--trainer", "pp=1", "--inference", "tp=2", "--syncs", 2)
        self.assertEqual(outcome.code, 0, outcome.err)
        lines = [line for line in outcome.err.splitlines() if line.startswith("sync ")]
        self.assertEqual(len(lines), 2, outcome.err)
        for number, line in enumerate(lines):
            self.assertRegex(line, rf"^sync {number + 1}/2: version {number}, \S+ \S+ in \S+ \S+ \(\S+ \S+\); slowest worker [01]: "
                                   r"\S+ \S+ in \S+ \S+ \(\S+ \S+\) against .*, \d+ % [a-z-]+( wait)?")

    def test_a_file_that_cannot_be_written_is_refused_before_the_sync(self):
        outcome = self.run_command("sync", "--shape", "qwen3-0.6b:tiny", "--trace", self.directory / "none" / "trace.json")
        self.assert_refused(outcome, "the trace file", "none/trace.json cannot be created: No such file or directory")
        os.mkfifo(self.directory / "pipe")
        for name in (".", "pipe"):
            outcome = self.run_command("sync", "--shape", "qwen3-0.6b:tiny", "--trace", self.directory / name)
            self.assert_refused(outcome, "--trace:", "is not a regular file")

    def test_processes_started_by_hand_write_their_own(self):
        """The sender's file has the fleet, a worker's its own part, on its own clock."""
        model = self.generate("qwen3-0.6b:tiny")
        fleet = self.directory / "fleet"
        fleet.mkdir(mode=0o700)
        common = ["--model", model, "--inference", "tp=2", "--trainer", "pp=2", "--fleet-dir", fleet]
        environment = {"SHARDPULL_TOKEN": "00000000000f1ee7"}
        running = [self.start("worker", "--id", id, *common, "--trace", self.directory / f"worker-{id}.json", environment=environment)
                   for id in (0, 1)]
        running += [self.start("trainer", "--rank", rank, *common, "--syncs", 2, "--trace", self.directory / f"trainer-{rank}.json",
                               environment=environment) for rank in (0, 1)]
        for each in running:
            outcome = each.finish()
            self.assertEqual(outcome.code, 0, outcome.err)
        for name, members in (("trainer-0", ["trainer 0", "trainer 1", "worker 0", "worker 1"]), ("trainer-1", ["trainer 1"]),
                              ("worker-0", ["worker 0"]), ("worker-1", ["worker 1"])):
            events, complete = complete_events(self.directory / f"{name}.json")
            self.assertEqual(sorted(self.processes_of(events).values()), members, name)
            self.assertEqual(len([event for event in complete if event["cat"] == "sync"]), 2 * len(members), name)
            self.assert_nests(complete)


class Troubled(TraceChecks, FaultTest):
    """Traces of fleets in which something went wrong: what is left of them is a whole file that adds up."""

    def launch_traced(self, syncs, *flags, **how):
        self.trace = self.directory / "trace.json"
        self.launch(syncs, *flags, own_flags={"trainer 0": ("--trace", self.trace)}, **how)

    def read(self):
        """(the events of the syncs by process and sync, all complete events, names by pid, what the instant events say)"""
        events, complete = complete_events(self.trace)
        names = self.processes_of(events)
        self.assert_nests(complete)
        said = [event["name"] for event in events if event["ph"] == "i"]
        return self.assert_all_add_up(complete, names), complete, names, said

    def members(self, syncs, number):
        return {name for name, of in syncs if of == number}

    def test_a_sync_that_loses_a_worker(self):
        """Degraded: the others' parts add up, the lost one is named, and so is the straggler of those that are left."""
        self.launch_traced(4, faults={"worker 3": "kill@worker.transferring/2:1"})
        self.expect_sync()
        self.next_sync()
        self.check_sync(self.sync_line(), 3)
        self.processes["worker 3"].wait()
        self.expect_sync(3)
        self.restart_worker(3)
        self.expect_sync(4)
        self.end()
        syncs, _, names, said = self.read()
        everybody = {"trainer 0", "trainer 1", "worker 0", "worker 1", "worker 2", "worker 3"}
        self.assertEqual(set(names.values()), everybody)
        for number, members in ((1, everybody), (2, everybody - {"worker 3"}), (3, everybody - {"worker 3"}), (4, everybody)):
            self.assertEqual(self.members(syncs, number), members, number)
            self.assertRegex(syncs["trainer 0", number]["args"]["summary"], r"slowest worker [0-3]: .*%")
        self.assertEqual(said, ["no timeline of worker 3"])

    def test_a_sync_that_loses_a_trainer(self):
        """Failed: the workers' waits add up to when they gave up, and say whom they were for."""
        self.launch_traced(3, "--path", "packed", inference="replicas=2", workers=2, connect_timeout=5,
                           faults={"trainer 1": "kill@rank.packing/2:1"})
        self.expect_sync()
        self.next_sync()
        self.next_sync()  # it is sent again, and the trainer waited for
        self.expect_failure("trainer 1", 15 * SLOWNESS, but=["trainer 1"])
        syncs, complete, names, said = self.read()
        self.assertEqual(self.members(syncs, 2), {"trainer 0", "worker 0", "worker 1"})
        self.assertIn("no timeline of trainer 1", said)
        self.assertIn("trainer 1", syncs["trainer 0", 2]["args"]["summary"])
        failed = syncs["trainer 0", 2]
        causes = {event["args"]["cause"] for event in complete if event["cat"] == "charged" and event["name"] == "produce wait"
                  and event["ts"] >= failed["ts"]}
        for cause in causes:
            self.assertRegex(cause, r"^trainer (0: .*|1: its timeline has not come)$")

    def test_a_sync_that_stalls(self):
        """Failed: the error names the straggler, and the ranks' time is charged to waiting for it."""
        self.launch_traced(2, "--path", "packed", "--stall-timeout", f"{2 * SLOWNESS}s", inference="replicas=2", workers=2,
                           faults={"worker 1": "announce@worker.landed/2:1"})
        self.expect_sync()
        self.next_sync()
        at = self.announced("worker.landed", self.processes["worker 1"])
        self.assertEqual(self.processes["trainer 0"].wait(30 * SLOWNESS), 1)
        at.go()
        syncs, _, _, said = self.read()
        sender = syncs["trainer 0", 2]
        self.assertIn("worker 1", sender["args"]["summary"])
        self.assertIn("no timeline of worker 1", said)
        self.assertIn(("worker 0", 2), syncs)
        waited = sum(times["charged_us"] for phase, times in sender["args"]["phases"].items() if phase.endswith(" wait"))
        self.assertGreater(waited, 0.5 * sender["dur"])

    def test_a_failed_sync_and_the_next_one(self):
        """The last replica is lost and comes back: both syncs are in the file."""
        self.launch_traced(2, inference="tp=2", workers=2, faults={"worker 1": "announce@worker.scattered/2:1"})
        self.expect_sync()
        self.next_sync()
        self.announced("worker.scattered", self.processes["worker 1"])
        self.processes["worker 1"].signal(signal.SIGKILL)
        self.processes["worker 1"].wait()
        self.announced("sender.sending").go()
        self.restart_worker(1)
        self.check_sync(self.sync_line(), 2)
        self.end()
        syncs, _, _, said = self.read()
        self.assertEqual(self.members(syncs, 2), {"trainer 0", "trainer 1", "worker 0"})
        self.assertEqual(self.members(syncs, 3), {"trainer 0", "trainer 1", "worker 0", "worker 1"})
        self.assertIn("worker 1", syncs["trainer 0", 2]["args"]["summary"])
        self.assertEqual(said, ["no timeline of worker 1"])

    def test_a_sender_that_is_killed(self):
        """Its file is whole, up to the last sync that ended."""
        self.launch_traced(3, faults={"trainer 0": "announce@sender.prepared/2:1"})
        self.expect_sync()
        self.next_sync()
        self.announced("sender.prepared", self.processes["trainer 0"])
        self.processes["trainer 0"].signal(signal.SIGKILL)
        self.expect_failure("trainer 0", 10 * SLOWNESS, but=["trainer 0"])
        syncs, _, _, said = self.read()
        self.assertEqual(len(self.members(syncs, 1)), 6)
        self.assertEqual(len(syncs), 6)
        self.assertEqual(said, [])


if __name__ == "__main__":
    unittest.main()

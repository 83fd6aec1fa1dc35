"""Traces of real syncs: one file for the fleet, in which the phases of every process add up and clocks agree."""

# ctest-timeout: 300
# ctest-processors: 2

import collections
import json
import unittest

from fleet_testing import FleetTest

# Rounding of the trace's microseconds.
ROUND = 0.002


def complete_events(path):
    trace = json.loads(path.read_text())
    return trace["traceEvents"], [event for event in trace["traceEvents"] if event["ph"] == "X"]


class Trace(FleetTest):
    def processes(self, events):
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
                names = self.processes(events)
                self.assertEqual(sorted(names.values()), ["trainer 0", "trainer 1", "worker 0", "worker 1"])
                self.assert_nests(complete)
                self.assertGreater(self.assert_clocks_agree(complete, names, report["syncs"]), 0)
                for pid, name in names.items():
                    kind = "window" if name.startswith("worker") else "sync"
                    windows = [(event["ts"], event["ts"] + event["dur"]) for event in complete if event["pid"] == pid and event["cat"] == kind]
                    self.assertEqual(len(windows), 6 if kind == "window" else 3, name)
                    self.assert_adds_up(complete, pid, windows)
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
        outcome = self.run_command("sync", "--shape", "qwen3-0.6b:tiny", "--trace", self.directory)
        self.assert_refused(outcome, "cannot be created: Is a directory")

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
            self.assertEqual(sorted(self.processes(events).values()), members, name)
            self.assertEqual(len([event for event in complete if event["cat"] == "sync"]), 2 * len(members), name)
            self.assert_nests(complete)


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""A whole sync on one host against the limit of the same run.

Runs `shardpull sync` on one shape for each transport and path and prints, per row, the medians over its syncs after one
warm-up: wall time, the limit, their ratio with its spread, and the time of the export copies. The limit of shm is plain
memcpy, probed right before and after each sync; that of cma is process_vm_readv of the same keys, one reader a worker,
probed after; neither sums what it reads, which "no sums" leaves out too. Syncs whose two probes of memcpy differ by more than 15 % are dropped and counted.

    bench/sync_bench.py SHARDPULL [--shape qwen3-0.6b:scaled] [--syncs 9] [--quick] [--trace | --commit]

With --trace it compares instead: each path is run with and without a trace in turn, and the table says how much longer its
syncs take, by the medians of their ratios to the limit.

With --commit syncs are staged, and the table has the window of their commits, in which readers keep off: of a sync the
slowest worker's, against memcpy of the same bytes by all workers at once, probed right before and after that sync. The
middle ratio must stay below 1.25.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

CMA = ["--transport", "cma", "--export-pack-limit", "0"]
# name, flags, the field of a sync's report that holds the limit
CASES = [
    ("shm mapped, in place", ["--path", "mapped", "--export-pack-limit", "0"], "memcpy_limit_s"),
    ("shm mapped, export copy", ["--path", "mapped"], "memcpy_limit_s"),
    ("shm packed", ["--path", "packed"], "memcpy_limit_s"),
    ("cma direct, no sums", [*CMA, "--path", "direct", "--integrity", "off"], "vectored_read_s"),
    ("cma auto, no sums", [*CMA, "--integrity", "off"], "vectored_read_s"),
    ("cma auto", CMA, "vectored_read_s"),
    ("cma packed", [*CMA, "--path", "packed"], "vectored_read_s"),
]


def run(shardpull, arguments):
    done = subprocess.run([shardpull, "sync", "--json", *arguments], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}shardpull sync failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def steady_syncs(report):
    measured = report["syncs"][1:]
    return [sync for sync in measured if sync["memcpy_steady"]] or measured


def compare_traced(shardpull, fleet, rounds=5):
    print(f"{'path':<26}{'plain':>8}{'traced':>8}{'cost':>8}{'syncs':>10}")
    with tempfile.TemporaryDirectory() as directory:
        trace = ["--trace", os.path.join(directory, "trace.json")]
        for name, flags, limit in CASES:
            ratios = {False: [], True: []}
            for number in range(2 * rounds):
                traced = number % 4 in (1, 2)  # plain, traced, traced, plain: a drift of the machine cancels
                report = run(shardpull, [*fleet, *flags, *(trace if traced else [])])
                ratios[traced] += [sync["wall_s"] / sync[limit] for sync in steady_syncs(report)]
            plain, with_trace = (statistics.median(ratios[traced]) for traced in (False, True))
            print(f"{name:<26}{plain:>8.2f}{with_trace:>8.2f}{100 * (with_trace / plain - 1):>7.1f}%"
                  f"{f'{len(ratios[False])}+{len(ratios[True])}':>10}", flush=True)


def measure_commits(shardpull, shape, syncs):
    print(f"{'path':<26}{'workers':>8}{'commit':>10}{'memcpy':>10}{'ratio':>8}{'spread':>16}{'steady':>8}")
    for workers in (1, 2):
        for name, flags, _ in (CASES[0], CASES[2], CASES[5]):
            report = run(shardpull, ["--shape", shape, "--trainer", "pp=2", "--inference", f"tp={workers}", "--apply", "staged",
                                     "--syncs", str(syncs), *flags])
            used = steady_syncs(report)
            commits = [max(worker["commit_s"] for worker in sync["workers"]) for sync in used]
            ratios = sorted(commit / sync["memcpy_limit_s"] for commit, sync in zip(commits, used))
            memcpy = statistics.median(sync["memcpy_limit_s"] for sync in used)
            print(f"{name:<26}{workers:>8}{1e3 * statistics.median(commits):>7.1f} ms{1e3 * memcpy:>7.1f} ms"
                  f"{statistics.median(ratios):>8.2f}{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>16}"
                  f"{f'{len(used)}/{syncs - 1}':>8}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shardpull", help="the shardpull command")
    parser.add_argument("--shape", default="qwen3-0.6b:scaled")
    parser.add_argument("--syncs", type=int, default=9, help="per path, the first is warm-up")
    parser.add_argument("--quick", action="store_true", help="tiny shape, three syncs: does it run at all")
    parser.add_argument("--trace", action="store_true", help="compare syncs with a trace to those without")
    parser.add_argument("--commit", action="store_true", help="measure the commits of staged syncs")
    given = parser.parse_args()
    shape, syncs = ("qwen3-0.6b:tiny", 3) if given.quick else (given.shape, given.syncs)

    print(f"{shape}, trainer pp=2, inference {'tp=1 and 2' if given.commit else 'tp=2'}, {syncs - 1} syncs a path after one warm-up; "
          f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}")
    if given.trace:
        return compare_traced(given.shardpull, ["--shape", shape, "--trainer", "pp=2", "--inference", "tp=2", "--syncs", str(syncs)])
    if given.commit:
        return measure_commits(given.shardpull, shape, syncs)
    print(f"{'path':<26}{'wall':>10}{'limit':>10}{'export':>10}{'ratio':>8}{'spread':>16}{'less export':>13}{'steady':>8}")
    for name, flags, limit in CASES:
        report = run(given.shardpull, ["--shape", shape, "--trainer", "pp=2", "--inference", "tp=2",
                                       "--syncs", str(syncs), *flags])
        measured = report["syncs"][1:]
        steady = [sync for sync in measured if sync["memcpy_steady"]]
        used = steady_syncs(report)
        ratios = sorted(sync["wall_s"] / sync[limit] for sync in used)
        less_export = [(sync["wall_s"] - sync["export_copy_s"]) / sync[limit] for sync in used]

        def median_ms(field):
            return f"{1e3 * statistics.median(sync[field] for sync in used):.1f} ms"

        print(f"{name:<26}{median_ms('wall_s'):>10}{median_ms(limit):>10}{median_ms('export_copy_s'):>10}"
              f"{statistics.median(ratios):>8.2f}{f'{ratios[0]:.2f}..{ratios[-1]:.2f}':>16}"
              f"{statistics.median(less_export):>13.2f}{f'{len(steady)}/{len(measured)}':>8}")
    print("ratio: wall / limit. less export: (wall - export copy) / limit. steady: syncs whose two probes of the limit agree "
          "within 15 %; the others are dropped unless there is none.")


if __name__ == "__main__":
    main()

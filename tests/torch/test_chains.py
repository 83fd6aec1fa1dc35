"""Op chains against real PyTorch: 20,000 random ones, compared in every respect.

SHARDPULL_CHAIN_SEED and SHARDPULL_CHAIN_COUNT choose others. The seed is printed; the same seed gives the same chains.
"""
# ctest-timeout: 600

import json
import os
import pathlib
import random
import subprocess
import sys
import unittest

try:
    import torch
except ImportError:
    torch = None

if torch is not None:
    import chains

BIN = pathlib.Path(os.environ.get("SHARDPULL_TEST_BIN_DIR", ".")) / "chain_check"
ELEMENT_BYTES_8 = ("U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0")
BATCH = 2000
MAX_REGIONS = 64
# Selections of up to this many elements are described by the fewest regions there are; larger ones follow the cuts of their
# chain's reshapes, and could do with somewhat fewer.
EXACT_ELEMENTS = 2048
NEAR = 4


def element_bytes(dtype):
    if dtype in ELEMENT_BYTES_8:
        return 1
    return int(dtype.lstrip("BIUFC")) // 8


def slice_positions(regions, element):
    """Every byte position that a canonical slice selects, in order."""
    result = []
    for offset, dims in regions:
        starts = [offset]
        for size, stride in dims:
            starts = [start + i * stride for start in starts for i in range(size)]
        result.extend(start * element + b for start in starts for b in range(element))
    return result


def byte_at(position):
    return (position * 167 + (position >> 8) * 59 + 13) & 0xFF


def difference(ours, theirs):
    """What is wrong with our answer, or None."""
    if not theirs["ok"]:
        return None if not ours["ok"] else f"torch refuses it: {theirs['error']}"
    if not ours["ok"]:
        return None if ours["reason"] == "limit" else f"torch accepts it: {ours['error']}"
    for field in ("dtype", "shape", "stride", "offset", "contiguous"):
        if ours[field] != theirs[field]:
            return f"{field} is {ours[field]}, torch says {theirs[field]}"
    if not ours["replays"]:
        return "the recorded chain does not replay to the same tensor"
    if "slice_error" in ours:
        return explain_refused_slice(ours, theirs)
    element = element_bytes(ours["dtype"])
    if slice_positions(ours["slice"], element) != theirs["positions"]:
        return f"the slice {ours['slice']} selects other elements, or another order"
    if len(ours["slice"]) > 1:
        fewest, slack = fewest_regions(theirs["positions"][::element])
        if len(ours["slice"]) > slack * fewest:
            return f"the slice {ours['slice']} has more than the {fewest} regions that would do"
    expected = bytes(byte_at(p) for p in theirs["positions"]).hex()
    for field in ("bytes", "strided_bytes"):
        if field in ours and ours[field] != expected:
            return f"{field} differ: {ours[field][:400]}"
    return None


def explain_refused_slice(ours, theirs):
    """A chain that works may still select what no slice describes. None when that is so."""
    element = element_bytes(ours["dtype"])
    positions = theirs["positions"]
    if ours["slice_reason"] == "limit":
        fewest, slack = fewest_regions(positions[::element])
        return None if slack * fewest > MAX_REGIONS else f"{fewest} regions would do: {ours['slice_error']}"
    for start in range(0, len(positions), element):
        whole = [positions[start] + b for b in range(element)]
        if positions[start] % element != 0 or positions[start : start + element] != whole:
            return None
    return f"all elements lie whole in the root: {ours['slice_error']}"


def region_lengths(starts, first):
    """The lengths of all prefixes of starts[first:] that one strided region enumerates.

    A region of merged dims repeats its longest arithmetic run, then the longest run of such runs, and so on.
    """
    lengths = [1]
    block = 1
    while True:
        repeats = 1
        step = None
        while first + (repeats + 1) * block <= len(starts):
            at = first + repeats * block
            distance = starts[at] - starts[at - block]
            if distance <= 0 or step not in (None, distance):
                break
            if any(starts[at + i] - starts[at - block + i] != distance for i in range(block)):
                break
            step = distance
            repeats += 1
        if repeats == 1:
            return lengths
        lengths.extend(block * count for count in range(2, repeats + 1))
        block *= repeats


def fewest_regions(starts):
    """The smallest number of strided regions that enumerate `starts`, and by which factor a slice may exceed it."""
    cost = [0] + [len(starts) + 1] * len(starts)
    for first in range(len(starts)):
        for length in region_lengths(starts, first):
            cost[first + length] = min(cost[first + length], cost[first] + 1)
    return cost[-1], 1 if len(starts) <= EXACT_ELEMENTS else NEAR


def run_check(cases):
    lines = "\n".join(json.dumps(case) for case in cases) + "\n"
    done = subprocess.run([str(BIN)], input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@unittest.skipIf(torch is None, "torch is not installed")
class Chains(unittest.TestCase):
    def test_random_chains(self):
        self.compare(chains.Generator.chain, int(os.environ.get("SHARDPULL_CHAIN_COUNT", 20000)))

    def test_equal_selections_have_equal_slices(self):
        """Over tiny tensors many chains select the same elements; compare() holds their slices side by side."""
        self.compare(chains.Generator.small_chain, int(os.environ.get("SHARDPULL_CHAIN_COUNT", 20000)) // 4)

    def compare(self, make, count):
        seed = int(os.environ.get("SHARDPULL_CHAIN_SEED", random.SystemRandom().randrange(2**32)))
        print(f"SHARDPULL_CHAIN_SEED={seed}", flush=True)
        generator = chains.Generator(seed)
        totals = {"accepted": 0, "refused": 0, "limit": 0, "no slice": 0, "regions": 0}
        canonical = {}
        for first in range(0, count, BATCH):
            cases = [make(generator) for _ in range(min(BATCH, count - first))]
            for case, ours in zip(cases, run_check(cases), strict=True):
                theirs = chains.apply_chain(case["dtype"], case["shape"], case["chain"])
                problem = difference(ours, theirs)
                if problem:
                    self.fail(f"seed {seed}: {problem}\n{json.dumps(case)}\n{json.dumps(ours)[:2000]}")
                totals["accepted" if theirs["ok"] else "refused"] += 1
                if theirs["ok"] and ours["ok"]:
                    totals["no slice"] += "slice_error" in ours
                    totals["regions"] += len(ours.get("slice", ())) > 1
                    if "slice" in ours:
                        self.check_canonical(canonical, ours, theirs, case, seed)
                elif theirs["ok"]:
                    totals["limit"] += 1
        print(totals, flush=True)
        self.assertGreater(totals["accepted"], count // 2)
        self.assertGreater(totals["refused"], count // 50)

    def check_canonical(self, seen, ours, theirs, case, seed):
        """Equal elements in equal order: equal slices, however the chain was written."""
        key = (element_bytes(ours["dtype"]), tuple(theirs["positions"]))
        known = seen.setdefault(key, (ours["slice"], case))
        if known[0] != ours["slice"]:
            self.fail(f"seed {seed}: one selection, two slices: {known[0]} and {ours['slice']}\n{known[1]}\n{case}")


if __name__ == "__main__":
    unittest.main(argv=sys.argv)

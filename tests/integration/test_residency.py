"""What a trainer holds beyond its weights, at most: (lookahead + 1) x (largest group + its export buffer) + serve rings."""

# ctest-timeout: 300
# ctest-processors: 2

import pathlib
import re
import unittest

from fleet_testing import FleetTest, SANITIZED

SLACK = 64 << 20  # for the process itself: code, libraries, threads
SYNCS, WARM = 8, 3


def status_bytes(pid, field):
    text = (pathlib.Path("/proc") / str(pid) / "status").read_text()
    return int(re.search(rf"(?m)^{field}:\s*(\d+) kB", text)[1]) << 10


@unittest.skipIf(SANITIZED, "sanitizers keep what is freed")
class Residency(FleetTest):
    def test_peak_after_warm_up(self):
        """Anonymous memory and memory files of both trainers, which gather what the other holds, for each lookahead."""
        shape = ("qwen3-0.6b:scaled", "--vocab", 4096)  # 11 groups of about 28 MiB
        model = self.generate(*shape)
        fleet = self.directory / "fleet"
        fleet.mkdir(mode=0o700)
        for lookahead in (0, 1, 3):
            with self.subTest(f"lookahead {lookahead}"):
                layout = ("--model", model, "--trainer", "fsdp=2", "--publish", "gather", "--inference", "tp=2", "--path", "packed",
                          "--lookahead", lookahead)
                planned = self.run_command("plan", *layout, "--json").json()
                common, token = (*layout, "--fleet-dir", fleet), {"SHARDPULL_TOKEN": "0123456789abcdef"}
                running = [self.start("worker", "--id", number, *common, environment=token) for number in range(2)]
                other = self.start("trainer", "--rank", 1, "--syncs", SYNCS, *common, environment=token)
                sender = self.start("trainer", "--rank", 0, "--syncs", SYNCS, *common, environment=token)
                peaks = {}
                for line in sender.process.stdout:
                    number = int(line.split()[1].rstrip(":")) if line.startswith("sync ") else 0
                    for rank, pid in enumerate((sender.pid, other.pid)):
                        if number == WARM:
                            pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")  # forgets the peak so far
                        elif number == SYNCS - 1:
                            peaks[rank] = status_bytes(pid, "VmHWM") - status_bytes(pid, "RssFile")
                for process in (*running, other, sender):
                    self.assertEqual(process.finish().code, 0)
                held = planned["model"]["bytes"] // 2
                for rank, peak in peaks.items():
                    producer = planned["producers"][rank]
                    buffers = producer["export_buffer_bytes"]  # lookahead + 1, each of the largest group, all of it small tensors
                    promise = 2 * buffers + producer["serve_ring_bytes"]
                    print(f"lookahead {lookahead}, trainer {rank}: {(peak - held) >> 20} MiB beyond its weights, {promise >> 20} MiB promised")
                    self.assertLessEqual(peak - held, promise + SLACK)
                    self.assertGreater(peak - held, promise // 2, "the figure does not measure what it should")
                self.assertEqual(len(peaks), 2)
        self.assert_nothing_left()


if __name__ == "__main__":
    unittest.main()

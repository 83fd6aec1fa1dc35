# ctest-label: models
# ctest-timeout: 1800
"""The Promela models of this folder, checked by spin: what must hold holds, and each planted bug is found.

README.md says what each model mirrors and leaves out. A model's "mirrors" lines name words of the sources; they must
be there still, so that a model cannot outlive the code that it is about.
"""

import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MEMORY_MIB = 900
# pan's words for what it found.
ASSERTION = "assertion violated"
ENDLESS = "acceptance cycle"  # something that must happen may never happen
STUCK = "invalid end state"

SAFETY = (["-DSAFETY", "-DNOCLAIM"], ["-E"])  # assertions
ENDS = (["-DSAFETY"], [])  # assertions, and that everybody ends
FAIR = (["-DNFAIR=3"], ["-a", "-f", "-N", "always_ends"])  # liveness, every process moves in the end

# (model, defines, how): the whole state space, without an error.
HOLDS = [
    ("slots", {"CHUNKS": 3}, SAFETY),
    ("slots", {"CHUNKS": 3, "LEAVE": 1}, SAFETY),
    ("slots", {"K": 1, "CHUNKS": 2, "LEAVE": 1, "REGROW": 1}, SAFETY),
    ("barrier", {}, SAFETY),
    ("barrier", {"LOSSES": 0, "RESTARTS": "NOBODY", "LAG": 0}, FAIR),
    ("barrier", {"SYNCS": 1}, FAIR),
    ("commit", {}, ENDS),
    ("commit", {"M": 3, "FROM_PREPARED": 1, "SUSPICIONS": 0}, ENDS),
    ("takeover", {"CHUNKS": 5}, ENDS),
    ("takeover", {"UNREACHABLE": 1}, ENDS),
    ("takeover", {"C": 2, "P": 2, "CHUNKS": 3}, ENDS),
    ("takeover", {"C": 2, "P": 2, "CHUNKS": 3, "UNREACHABLE": 2}, ENDS),
]

# (model, planted bug, defines, how, what spin must find)
PLANTED = [
    ("slots", "BUG_SLOT_BY_ARRIVAL", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_MEETING_WITHOUT_ALL", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_PACK_OVER_PACK", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_NO_DRAIN", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_NO_GENERATION", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_FAIL_WITHOUT_DRAIN", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_STALE_READY", {"CHUNKS": 3}, SAFETY, ASSERTION),
    ("slots", "BUG_REGROW_WHILE_READ", {"CHUNKS": 3, "REGROW": 1}, SAFETY, ASSERTION),
    ("barrier", "BUG_COUNT_SIGNALS", {"SYNCS": 1}, SAFETY, ASSERTION),
    ("barrier", "BUG_FREE_ON_FIRST", {"SYNCS": 1}, SAFETY, ASSERTION),
    ("barrier", "BUG_SIGNAL_WHILE_READING", {"SYNCS": 1}, SAFETY, ASSERTION),
    ("barrier", "BUG_STALE_SYNC", {}, SAFETY, ASSERTION),
    ("barrier", "BUG_BEGIN_ERASES_EARLY", {"SYNCS": 1}, FAIR, ENDLESS),
    ("barrier", "BUG_LOSS_KEEPS_BARRIER", {"SYNCS": 1}, FAIR, ENDLESS),
    ("barrier", "BUG_LOSS_BEFORE_BEGIN", {"SYNCS": 1}, FAIR, ENDLESS),
    ("commit", "BUG_FINISH_WITHOUT_MATE", {}, ENDS, ASSERTION),
    ("commit", "BUG_LATE_FINISH", {}, ENDS, ASSERTION),
    ("commit", "BUG_ABORT_WITHOUT_ASKING", {}, ENDS, ASSERTION),
    ("commit", "BUG_ASKED_IS_NOT_FENCED", {}, ENDS, ASSERTION),
    ("commit", "BUG_FAIL_WHILE_COMMITTED", {}, ENDS, ASSERTION),
    ("commit", "BUG_FAIL_WHILE_DECIDING", {}, ENDS, ASSERTION),
    ("commit", "BUG_ONE_ROUND", {"M": 3, "FROM_PREPARED": 1, "SUSPICIONS": 0}, ENDS, ASSERTION),
    ("takeover", "BUG_RECOVERY_RING_OF_K", {}, ENDS, ASSERTION),
    ("takeover", "BUG_REROUTE_IN_REGULAR_LANE", {}, ENDS, ASSERTION),
    ("takeover", "BUG_STRANDED_FOR_GOOD", {}, ENDS, STUCK),
    ("takeover", "BUG_FORGETS_WHAT_IT_ASKED", {}, ENDS, STUCK),
    ("takeover", "BUG_NOBODY_LEAVES", {"C": 2, "P": 2, "CHUNKS": 3, "UNREACHABLE": 1}, ENDS, STUCK),
    ("takeover", "BUG_LEAVES_WHILE_READING", {"C": 2, "P": 2, "CHUNKS": 3, "UNREACHABLE": 1}, ENDS, ASSERTION),
]

# What the code does not promise: README.md, "Known gaps". A gap that is closed is to be taken off this list.
GAPS = [
    ("barrier", {"SYNCS": 1, "UP_ANY_TIME": 1}, FAIR, ENDLESS),
    ("commit", {"COMMIT_FAILS": 1}, ENDS, ASSERTION),
    ("commit", {"SILENCES": 1}, ENDS, ASSERTION),
]


def run(command, folder):
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def name_of(model, defines):
    return " ".join([model, *(f"{name}={value}" for name, value in defines.items())])


class Spin(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
        if missing:
            raise unittest.SkipTest(f"{' and '.join(missing)} is not installed")

    def verify(self, model, defines, how, optimise="-O2"):
        """Pan's report on the whole state space, or as far as the first error, with the way there."""
        compiled, checked = how
        given = [f"-D{name}={value}" for name, value in defines.items()]
        with tempfile.TemporaryDirectory(prefix="shardpull-model-") as name:
            folder = pathlib.Path(name)
            source = folder / f"{model}.pml"
            shutil.copy(HERE / source.name, source)
            code, text = run(["spin", "-a", *given, source.name], folder)
            self.assertTrue(code == 0 and "Error" not in text, text)
            code, text = run(
                ["gcc", optimise, "-w", f"-DMEMLIM={MEMORY_MIB}", *compiled, "-o", "pan", "pan.c"], folder
            )
            self.assertEqual(code, 0, text)
            code, report = run(["./pan", "-m100000", "-w22", "-n", *checked], folder)
            self.assertRegex(report, r"errors: \d+", report)
            trail = folder / f"{source.name}.trail"
            way = run(["spin", "-k", trail.name, "-p", *given, source.name], folder)[1] if trail.exists() else ""
        return report, way

    def holds(self, model, defines, how):
        report, way = self.verify(model, defines, how)
        states = re.search(r"(\d+) states, stored", report).group(1)
        print(f"{name_of(model, defines)}: {states} states", flush=True)
        steps = [line for line in way.splitlines() if "[" in line]
        self.assertIn("errors: 0", report, "\n".join([report, *steps[-80:]]))
        self.assertNotRegex(report, "max search depth too small|memory limit|out of memory", "some of it was not seen")

    def finds(self, model, defines, how, found):
        report, _ = self.verify(model, defines, how, "-O0")
        self.assertIn("errors: 1", report, f"{name_of(model, defines)}: spin must find an error, and finds none")
        self.assertRegex(report, f"pan:1: .*{found}")

    def test_what_must_hold_holds(self):
        for model, defines, how in HOLDS:
            with self.subTest(name_of(model, defines)):
                self.holds(model, defines, how)

    def test_planted_bugs_are_found(self):
        for model, bug, defines, how, found in PLANTED:
            with self.subTest(f"{model} {bug}"):
                self.finds(model, {bug: 1, **defines}, how, found)

    def test_known_gaps_are_gaps_still(self):
        for model, defines, how, found in GAPS:
            with self.subTest(name_of(model, defines)):
                self.finds(model, defines, how, found)


class Names(unittest.TestCase):
    MIRRORS = re.compile(r"^// mirrors (\S+): (.+)$", re.MULTILINE)

    def models(self):
        return {path.stem: path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.pml"))}

    def test_the_code_that_is_mirrored_exists(self):
        wrong = []
        for model, text in self.models().items():
            mirrored = self.MIRRORS.findall(text)
            self.assertTrue(mirrored, f"{model} mirrors nothing")
            words = set(re.findall(r"\w+", self.MIRRORS.sub("", text)))
            for path, names in mirrored:
                if not (ROOT / path).is_file():
                    wrong.append(f"{model}: {path}: no such file")
                    continue
                source = set(re.findall(r"\w+", (ROOT / path).read_text(encoding="utf-8")))
                for name in names.split():
                    if name not in source:
                        wrong.append(f"{model}: {path} has no {name} any more")
                    # StartUpdate is start_update in Promela, kUpdating is updating.
                    plain = re.sub(r"^k(?=[A-Z])", "", name)
                    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", plain).lower()
                    if not {name, plain, snake} & words:
                        wrong.append(f"{model}: {name} of {path} is not in the model")
        self.assertEqual(wrong, [])

    def test_every_planted_bug_is_checked(self):
        bugs = {model: re.findall(r"#ifdef (BUG_\w+)", text) for model, text in self.models().items()}
        planted = {(model, bug) for model in bugs for bug in bugs[model]}
        self.assertEqual(planted, {(model, bug) for model, bug, *_ in PLANTED})

    def test_every_model_is_described(self):
        readme = (HERE / "README.md").read_text(encoding="utf-8")
        for model, text in self.models().items():
            self.assertIn(f"## {model}.pml", readme)
            for bug in re.findall(r"#ifdef (BUG_\w+)", text):
                self.assertIn(f"`{bug}`", readme)


if __name__ == "__main__":
    unittest.main()

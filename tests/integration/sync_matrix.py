"""The settings that a sync must be exact for, and how one point of them is run."""

import itertools
import json
import subprocess

from fleet_testing import PYTHON, SOURCE_DIR

# family: (shape, flags)
FAMILIES = {
    "llama": ("llama-3-70b:tiny", ("--untied",)),
    "llama-tied": ("llama-3-70b:tiny", ("--tied",)),
    "qwen2": ("qwen2-0.5b:tiny", ("--untied",)),
    "qwen2-tied": ("qwen2-0.5b:tiny", ("--tied",)),
    "qwen3": ("qwen3-8b:tiny", ("--untied",)),
    "qwen3-tied": ("qwen3-0.6b:tiny", ("--tied",)),
    "bert": ("minilm:tiny", ()),
}

AXES = {
    "family": tuple(FAMILIES),
    "vocab": (100, 1024),
    "trainer": ("pp=1", "pp=2", "pp=3"),
    "inference": ("tp=1", "tp=2", "tp=4", "tp=2,pp=2"),
    "path": ("packed", "mapped"),
    "lookahead": (0, 1, 3),
    "ring_depth": (1, 2, 4),
}


def legal(point):
    """The BERT family has no pipeline stages; it is tried on one and two ranks."""
    return point["family"] != "bert" or point["inference"] in ("tp=1", "tp=2")


def every_point():
    for values in itertools.product(*AXES.values()):
        point = dict(zip(AXES, values))
        if legal(point):
            yield point


def pairwise_points():
    """A small part of every_point() in which each legal pair of settings occurs: greedy, the same every time."""

    def pairs(point):
        return {((a, point[a]), (b, point[b])) for a, b in itertools.combinations(AXES, 2)}

    points = list(every_point())
    missing = set().union(*map(pairs, points))
    chosen = []
    while missing:
        best = max(points, key=lambda point: len(pairs(point) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def describe(point):
    return " ".join(f"{key}={value}" for key, value in point.items())


def model_of(test, point, cache):
    """The generated checkpoint of a point, made once per `cache`."""
    key = (point["family"], point["vocab"])
    if key not in cache:
        shape, flags = FAMILIES[point["family"]]
        cache[key] = test.generate(shape, *flags, "--vocab", point["vocab"], name="-".join(map(str, key)))
    return cache[key]


def run_point(test, point, model, syncs, *flags):
    return test.run_command(
        "sync", "--model", model, "--trainer", point["trainer"], "--inference", point["inference"], "--path", point["path"],
        "--lookahead", point["lookahead"], "--ring-depth", point["ring_depth"], "--syncs", syncs, "--verify", "--json", *flags)


def workers_of(inference):
    words = dict(word.split("=") for word in inference.split(","))
    count = 1
    for value in words.values():
        count *= int(value)
    return count


def compare_dumps(model, inference, version, dumps):
    """Runs the independent script over all workers' dumps; a text for every worker that differs."""
    script = (
        "import contextlib, io, json, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import cut_reference\n"
        "wrong = []\n"
        "for words in json.loads(sys.argv[2]):\n"
        "    text = io.StringIO()\n"
        "    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):\n"
        "        code = cut_reference.main(words)\n"
        "    if code: wrong.append(' '.join(words) + ': ' + text.getvalue())\n"
        "print(json.dumps(wrong))\n"
    )
    calls = [
        [str(model), "--inference", inference, "--worker", str(worker), "--version", str(version), "--dump",
         str(dumps / f"worker-{worker}.safetensors")]
        for worker in range(workers_of(inference))
    ]
    done = subprocess.run([PYTHON, "-c", script, str(SOURCE_DIR / "tests" / "reference"), json.dumps(calls)],
                          capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)

"""The settings that a sync must be exact for, and how one point of them is run."""

import itertools
import json
import random
import subprocess

from fleet_testing import PYTHON, SOURCE_DIR, has_cma

# family: (shape, flags)
FAMILIES = {
    "llama": ("llama-3-70b:tiny", ("--untied",)),
    "llama-tied": ("llama-3-70b:tiny", ("--tied",)),
    "qwen2": ("qwen2-0.5b:tiny", ("--untied",)),
    "qwen2-tied": ("qwen2-0.5b:tiny", ("--tied",)),
    "qwen3": ("qwen3-8b:tiny", ("--untied",)),
    "qwen3-tied": ("qwen3-0.6b:tiny", ("--tied",)),
    "qwen3_moe": ("qwen3-30b-a3b:tiny", ()),
    "deepseek_v3": ("deepseek-v3:tiny", ()),
    "bert": ("minilm:tiny", ()),
}

AXES = {
    "family": tuple(FAMILIES),
    "vocab": (100, 1024),
    "trainer": ("pp=1", "pp=2", "pp=3", "ep=2", "fsdp=2", "fsdp=3", "fsdp=8", "pp=2,ep=2", "pp=2,fsdp=2"),
    "inference": ("tp=1", "tp=2", "tp=4", "ep=2", "ep=4", "tp=2,dp=2,ep=4", "tp=2,pp=2", "tp=2,replicas=2", "tp=1,replicas=3"),
    "publish": ("gather", "resident"),
    "path": ("packed", "mapped", "direct"),
    "transport": ("shm", "cma", "tcp") if has_cma() else ("shm", "tcp"),
    "lookahead": (0, 1, 3),
    "ring_depth": (1, 2, 4),
    "split": ((1, 1), (3, 1), (1, 2), (2, 3)),
    "integrity": ("off", "wire", "full"),
    "apply": ("inplace", "staged"),
}


def legal(point):
    """Only shm maps. The BERT family has neither pipeline stages nor experts; it is tried on tp alone."""
    if point.get("path") == "mapped" and point.get("transport") not in ("shm", None):
        return False
    return point.get("family") != "bert" or point["inference"] in ("tp=1", "tp=2", "tp=2,replicas=2", "tp=1,replicas=3")


def full_points(fixed=("vocab", "transport", "lookahead", "ring_depth", "split", "integrity", "apply")):
    """Every combination of the other axes; those in `fixed` take a value from each point's own place in the list."""
    free = [axis for axis in AXES if axis not in fixed]
    for number, values in enumerate(itertools.product(*(AXES[axis] for axis in free))):
        point = dict(zip(free, values))
        draw = random.Random(number)
        point.update({axis: draw.choice(AXES[axis]) for axis in fixed})
        if point["path"] == "mapped":
            point["transport"] = "shm"
        if legal(point):
            yield {axis: point[axis] for axis in AXES}


def settings_points():
    """Every combination of the settings of one process, over whole tensors; publishing, splits and integrity take turns."""
    few = dict(
        AXES,
        family=tuple(family for family in FAMILIES if family not in ("qwen3_moe", "deepseek_v3")),
        trainer=("pp=1", "pp=2", "pp=3"),
        inference=("tp=1", "tp=2", "tp=4", "tp=2,pp=2"),
        publish=("gather",),
        split=((1, 1),),
        transport=("shm",),
        integrity=("wire",),
        apply=("inplace",),
    )
    for number, values in enumerate(itertools.product(*few.values())):
        point = dict(zip(few, values))
        if legal(point):
            draw = random.Random(number)
            yield dict(point, publish=draw.choice(AXES["publish"]), split=draw.choice(AXES["split"]),
                       integrity=draw.choice(AXES["integrity"]), apply=draw.choice(AXES["apply"]))


def pairwise_points():
    """A small set of points in which each legal pair of settings occurs: greedy among random ones, the same every time."""

    def pairs(point):
        return {((a, point[a]), (b, point[b])) for a, b in itertools.combinations(AXES, 2)}

    draw = random.Random(1)
    missing = set()
    for a, b in itertools.combinations(AXES, 2):
        for x, y in itertools.product(AXES[a], AXES[b]):
            if (a, b) in (("family", "inference"), ("path", "transport")) and not legal({a: x, b: y}):
                continue
            missing.add(((a, x), (b, y)))
    chosen = []
    while missing:
        wanted = dict(min(missing, key=str))
        tries = []
        while len(tries) < 60:
            point = {axis: wanted.get(axis, draw.choice(values)) for axis, values in AXES.items()}
            if legal(point):
                tries.append(point)
        best = max(tries, key=lambda point: len(pairs(point) & missing))
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
        "--transport", point["transport"],
        "--publish", point["publish"], "--chunk-split", point["split"][0], "--pull-split", point["split"][1],
        "--apply", point["apply"], "--lookahead", point["lookahead"], "--ring-depth", point["ring_depth"], "--integrity", point["integrity"], "--syncs", syncs, "--verify", "--json", *flags)


def workers_of(inference):
    words = {key: int(value) for key, value in (word.split("=") for word in inference.split(","))}
    tp = words.get("tp", words.get("ep", 1) // words.get("dp", 1))
    return tp * words.get("pp", 1) * words.get("dp", 1) * words.get("replicas", 1)


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

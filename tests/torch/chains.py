"""Random op chains, and what PyTorch makes of them.

Every chain runs on real torch tensors whose bytes say where they came from, so that shape, strides, offset and the order of
every single byte can be compared, and whether an operation is accepted at all.

As a program it writes the frozen corpus, tests/torch/corpus.jsonl: chains with torch's answers, for builds without torch.
    .venv/bin/python tests/torch/chains.py COUNT SEED > tests/torch/corpus.jsonl
"""

import json
import random
import sys

import torch

# Not torch.bool: torch makes every byte of a copied bool 0 or 1, and positions would be lost.
TORCH_DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
MULTI_OUTPUT = ("chunk", "split", "unbind")
REFUSALS = (IndexError, RuntimeError, TypeError, ValueError)
MAX_DIMS = 8


def roots(dtype, shape):
    """Two tensors of the same shape: byte i of the first is the low byte of i, of the second the high byte."""
    count = 1
    for size in shape:
        count *= size
    element = torch.empty(0, dtype=TORCH_DTYPES[dtype]).element_size()
    positions = torch.arange(count * element, dtype=torch.int64)
    halves = []
    for half in (positions & 0xFF, positions >> 8):
        halves.append(half.to(torch.uint8).view(TORCH_DTYPES[dtype]).view(shape))
    return halves


def positions(halves):
    """For each byte of the result, in row-major order, the byte of the root that it is."""
    low, high = (list(raw_bytes(half)) for half in halves)
    return [a + 256 * b for a, b in zip(low, high)]


def raw_bytes(tensor):
    if tensor.numel() == 0:
        return b""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    return copy.as_strided((copy.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def index_item(item):
    if item == "...":
        return Ellipsis
    if isinstance(item, dict):
        return slice(*item["slice"])
    return item


def argument(value):
    if isinstance(value, dict) and "dtype" in value:
        return TORCH_DTYPES[value["dtype"]]
    return value


def apply_op(tensor, op):
    """One operation on one torch tensor: a tensor, or a tuple of them."""
    method, arguments = op
    if method == "__getitem__" and isinstance(arguments[0], dict):
        items = tuple(index_item(item) for item in arguments[0]["index"])
        return tensor[items[0]] if len(items) == 1 else tensor[items]
    return getattr(tensor, method)(*(argument(value) for value in arguments))


def apply_chain(dtype, shape, chain):
    """What torch makes of a chain, as chain_check prints it, with the positions of all bytes instead of a slice."""
    halves = roots(dtype, shape)
    try:
        i = 0
        while i < len(chain):
            method = chain[i][0]
            results = [apply_op(half, chain[i]) for half in halves]
            if method in MULTI_OUTPUT:
                i += 1
                results = [result[chain[i][1][0]] for result in results]
            halves = results
            i += 1
    except REFUSALS as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"}
    tensor = halves[0]
    return {
        "ok": True,
        "dtype": NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "contiguous": tensor.is_contiguous(),
        "positions": positions(halves),
    }


class Generator:
    """Makes chains that mostly work, because operations are chosen for the shape at hand, and sometimes do not."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def chain(self):
        rng = self.random
        dtype = rng.choice(list(TORCH_DTYPES) + ["BF16", "F32", "U8"] * 3)
        return self.chain_over(dtype, self.shape())

    def small_chain(self):
        """Over so few elements that different chains often select the same ones."""
        return self.chain_over("U8", list(self.random.choice(((4, 6), (2, 3, 4), (12,), (3, 8), (5, 4)))))

    def chain_over(self, dtype, shape):
        rng = self.random
        tensor = roots(dtype, shape)[0]
        chain = []
        kinds = [None] * rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))
        if rng.random() < 0.3:  # a copy, cut across its grain
            kinds = ["permute", rng.choice(("flatten", "reshape")), rng.choice(("narrow", "index")), *kinds[:4]]
        for kind in kinds:
            op = self.operation(tensor, kind)
            try:
                result = apply_op(tensor, op)
            except REFUSALS:
                chain.append(op)
                if op[0] in MULTI_OUTPUT:
                    chain.append(["__getitem__", [0]])
                break
            chain.append(op)
            if op[0] in MULTI_OUTPUT:
                child = rng.randrange(-len(result), len(result)) if result and rng.random() > 0.02 else len(result)
                chain.append(["__getitem__", [child]])
                if not -len(result) <= child < len(result):
                    break
                result = result[child]
            tensor = result
            if tensor.dim() > MAX_DIMS or (tensor.numel() == 0 and rng.random() < 0.5):
                break
        case = {"dtype": dtype, "shape": shape, "chain": chain}
        if shape:
            layout = list(range(len(shape)))
            if rng.random() < 0.7:
                rng.shuffle(layout)
            case["layout"] = layout
            case["gap"] = rng.choice((0, 0, 1, 3))
        return case

    def shape(self):
        rng = self.random
        sizes = (1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 12, 16) if rng.random() < 0.95 else (0, 1, 2, 3, 4)
        shape = [rng.choice(sizes) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 3, 4, 5)))]
        while len(shape) > 1 and torch.Size(shape).numel() > 4000:
            shape.pop()
        return shape

    def dim(self, tensor, extra=0):
        rng = self.random
        ndim = max(tensor.dim() + extra, 1)
        if rng.random() < 0.03:
            return rng.choice((ndim, -ndim - 1, ndim + 3))
        return rng.randrange(-ndim, ndim)

    def operation(self, tensor, kind=None):
        kind = kind or self.random.choice(
            ("narrow", "view", "view", "reshape", "reshape", "index", "index", "select", "unsqueeze", "squeeze", "transpose")
            + ("transpose", "t", "permute", "permute", "flatten", "contiguous", "chunk", "split", "unbind", "dtype", "dtype")
        )
        return getattr(self, "make_" + kind)(tensor)

    def size_of(self, tensor, dim):
        return tensor.size(dim) if -tensor.dim() <= dim < tensor.dim() else 4

    def make_narrow(self, tensor):
        rng = self.random
        dim = self.dim(tensor)
        size = self.size_of(tensor, dim)
        start = rng.randrange(-size, size + 1)
        first = start + size if start < 0 else start
        length = rng.randint(0 if rng.random() < 0.1 else min(1, size - first), size - first)
        if rng.random() < 0.05:
            start, length = rng.choice(((start, size + 1), (size + 1, 0), (-size - 1, 1), (0, -1), (start, length + 1)))
        return ["narrow", [dim, start, length]]

    def make_sizes(self, tensor):
        """Sizes for view and reshape: the dims joined, cut into factors, or shuffled."""
        rng = self.random
        sizes = list(tensor.shape)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(sizes)) if sizes else 0
            choice = rng.random()
            if choice < 0.35 and len(sizes) > 1:
                at = rng.randrange(len(sizes) - 1)
                sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
            elif choice < 0.75 and sizes:
                factors = [f for f in range(1, sizes[at] + 1) if sizes[at] % f == 0] or [1]
                factor = rng.choice(factors)
                sizes[at : at + 1] = [factor, sizes[at] // factor]
            elif choice < 0.8:
                sizes = [tensor.numel()]
            elif choice < 0.85:
                sizes.insert(at, 1)
            elif choice < 0.9:
                rng.shuffle(sizes)
        if sizes and rng.random() < 0.3:
            sizes[rng.randrange(len(sizes))] = -1
        if sizes and rng.random() < 0.04:
            sizes[rng.randrange(len(sizes))] = rng.choice((-1, -2, 0, 3))
        return sizes

    def make_view(self, tensor):
        return ["view", [self.make_sizes(tensor)]]

    def make_reshape(self, tensor):
        return ["reshape", [self.make_sizes(tensor)]]

    def make_index(self, tensor):
        rng = self.random
        items = []
        dims = list(tensor.shape)
        for size in dims[: rng.randint(0, len(dims))]:
            choice = rng.random()
            if choice < 0.35:
                items.append(rng.randrange(-size, size) if size and rng.random() < 0.95 else size + rng.randint(-1, 1))
            else:
                low, high, step = (rng.choice((None, rng.randint(-size - 2, size + 2))) for _ in range(3))
                step = None if rng.random() < 0.6 else rng.randint(1, 4)
                if rng.random() < 0.03:
                    step = rng.choice((0, -1, 100))
                items.append({"slice": [low, high, step]})
        for extra, chance in ((None, 0.2), ("...", 0.25), (0, 0.03)):
            if rng.random() < chance:
                items.insert(rng.randint(0, len(items)), extra)
        if rng.random() < 0.03:
            # A second Ellipsis only at the end: before other items torch 2.13 reads past the end of its sizes.
            items.append("...")
        return ["__getitem__", [{"index": items}]]

    def make_select(self, tensor):
        rng = self.random
        dim = self.dim(tensor)
        size = self.size_of(tensor, dim)
        index = rng.randrange(-size, size) if size and rng.random() < 0.95 else rng.choice((size, -size - 1))
        return ["select", [dim, index]]

    def make_unsqueeze(self, tensor):
        return ["unsqueeze", [self.dim(tensor, 1)]]

    def make_squeeze(self, tensor):
        choice = self.random.random()
        if choice < 0.4:
            return ["squeeze", []]
        if choice < 0.7:
            return ["squeeze", [self.dim(tensor)]]
        return ["squeeze", [[self.dim(tensor) for _ in range(self.random.randint(0, 3))]]]

    def make_transpose(self, tensor):
        return ["transpose", [self.dim(tensor), self.dim(tensor)]]

    def make_t(self, _):
        return ["t", []]

    def make_permute(self, tensor):
        rng = self.random
        dims = list(range(tensor.dim()))
        rng.shuffle(dims)
        dims = [d - tensor.dim() if rng.random() < 0.3 else d for d in dims]
        if rng.random() < 0.05:
            dims = dims[:-1] if rng.random() < 0.5 else [self.dim(tensor) for _ in dims]
        return ["permute", [dims]]

    def make_flatten(self, tensor):
        rng = self.random
        start, end = self.dim(tensor), self.dim(tensor)
        if rng.random() < 0.8:
            ndim = max(tensor.dim(), 1)
            start, end = sorted((start, end), key=lambda d: d % ndim)
        return ["flatten", rng.choice(([], [start], [start, end], [start, end]))]

    def make_contiguous(self, _):
        return ["contiguous", []]

    def make_chunk(self, tensor):
        rng = self.random
        count = rng.randint(1, 5) if rng.random() < 0.95 else rng.choice((0, -1))
        return ["chunk", rng.choice(([count], [count, self.dim(tensor)], [count, self.dim(tensor)]))]

    def make_split(self, tensor):
        rng = self.random
        dim = self.dim(tensor)
        size = self.size_of(tensor, dim)
        if rng.random() < 0.5:
            return ["split", [rng.randint(1, max(size, 1)) if rng.random() < 0.93 else rng.choice((0, -1)), dim]]
        parts = []
        left = size
        while left > 0 and len(parts) < 6:
            part = rng.randint(0, left)
            parts.append(part)
            left -= part
        if rng.random() < 0.95:
            parts.append(left)
        if rng.random() < 0.03:
            parts.append(rng.choice((-1, 1)))
        return ["split", [parts, dim]]

    def make_unbind(self, tensor):
        return ["unbind", self.random.choice(([], [self.dim(tensor)], [self.dim(tensor)]))]

    def make_dtype(self, _):
        return ["view", [{"dtype": self.random.choice(list(TORCH_DTYPES))}]]


def write_corpus(count, seed):
    """Chains over small tensors, half of them accepted at least, with the root byte of every byte of the result."""
    generator = Generator(seed)
    written = refused = 0
    while written < count:
        case = generator.chain()
        if torch.Size(case["shape"]).numel() > 128:
            continue
        answer = apply_chain(case["dtype"], case["shape"], case["chain"])
        if not answer["ok"]:
            refused += 1
            if refused > count // 4:
                continue
            answer = {"ok": False}
        elif len(answer["shape"]) > MAX_DIMS or len(answer["positions"]) > 512:
            continue
        print(json.dumps({**case, "torch": answer}, separators=(",", ":")))
        written += 1


if __name__ == "__main__":
    write_corpus(int(sys.argv[1]), int(sys.argv[2]))

"""Every conversion the copy path makes, against PyTorch's: all values of 8-bit and 16-bit sources, edges and random bit
patterns of wider ones."""
# ctest-timeout: 600

import os
import pathlib
import subprocess
import sys
import unittest

try:
    import torch
except ImportError:
    torch = None

if torch is not None:
    DTYPES = {
        "BOOL": torch.bool,
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

BIN = pathlib.Path(os.environ.get("SHARDPULL_TEST_BIN_DIR", ".")) / "convert_check"


def source_values(name):
    """Source elements as a torch tensor: every bit pattern, or edges of every other format and random ones."""
    dtype = DTYPES[name]
    size = dtype.itemsize
    if name == "BOOL":
        return torch.tensor([False, True])
    if size <= 2:
        patterns = torch.arange(1 << (8 * size), dtype=torch.int64).to({1: torch.uint8, 2: torch.uint16}[size])
        return patterns.view(dtype)
    generator = torch.Generator().manual_seed(20240229)
    if name == "C64":
        parts = float_edges(torch.float32, generator)
        return torch.complex(parts, parts.roll(1))
    if dtype.is_floating_point:
        return float_edges(dtype, generator)
    bits = 8 * size
    edges = [(1 << k) + d for k in range(bits) for d in (-1, 0, 1)]
    edges = [v - (1 << bits) if v >= 1 << (bits - 1) else v for v in edges if 0 <= v < 1 << bits]
    signed = {4: torch.int32, 8: torch.int64}[size]
    patterns = torch.randint(-(1 << 62), 1 << 62, (20000,), generator=generator, dtype=torch.int64)
    patterns = patterns >> torch.randint(0, 62, (20000,), generator=generator)
    return torch.cat([torch.tensor(edges, dtype=torch.int64), patterns]).to(signed).view(dtype)


def float_edges(dtype, generator):
    """Values of the small formats, the halves between them and their neighbours, and random bit patterns."""
    small = []
    for other in (torch.float16, torch.bfloat16):
        small.append(torch.arange(1 << 16, dtype=torch.int64).to(torch.uint16).view(other).to(torch.float64))
    for other in (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu):
        small.append(torch.arange(1 << 8, dtype=torch.int64).to(torch.uint8).view(other).to(torch.float32).to(torch.float64))
    halves = []
    for values in small:
        values = values[torch.isfinite(values)].sort().values
        halves.append((values[1:] + values[:-1]) / 2)
    values = torch.cat(small + halves).to(dtype)
    up = torch.nextafter(values, torch.tensor(torch.inf, dtype=dtype))
    down = torch.nextafter(values, torch.tensor(-torch.inf, dtype=dtype))
    integer = {4: torch.int32, 8: torch.int64}[dtype.itemsize]
    info = torch.iinfo(integer)
    noise = torch.randint(info.min, info.max, (100000,), generator=generator, dtype=integer).view(dtype)
    return torch.cat([values, up, down, noise])


def ours(source, source_name, target_name):
    done = subprocess.run(
        [str(BIN), source_name, target_name],
        input=source.contiguous().view(torch.uint8).numpy().tobytes(),
        stdout=subprocess.PIPE,
        check=True,
    )
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.uint8).view(DTYPES[target_name])


def bits(tensor):
    size = tensor.element_size()
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def is_nan(tensor):
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=torch.bool)
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).isnan()


def defined(source, target):
    """Which conversions C++ defines: a float that an integer cannot hold converts to whatever the machine likes."""
    if source.is_complex() and not target.is_complex:
        source = source.real
    if not source.dtype.is_floating_point or target.is_floating_point or target.is_complex or target == torch.bool:
        return torch.ones(source.shape, dtype=torch.bool)
    info = torch.iinfo(target)
    wide = source.to(torch.float64) if source.dtype == torch.float64 else source.to(torch.float32).to(torch.float64)
    return (wide > info.min - 1.0) & (wide < float(info.max) + (1.0 if info.bits < 64 else 0.0))


@unittest.skipIf(torch is None, "torch is not installed")
class Conversions(unittest.TestCase):
    def test_every_pair_equals_torch(self):
        pairs = [line.split() for line in subprocess.run([str(BIN)], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()]
        compared = 0
        for source_name in DTYPES:
            source = source_values(source_name)
            for target_name, target in DTYPES.items():
                if source_name == target_name:
                    continue
                kind = next(k for a, b, k in pairs if (a, b) == (source_name, target_name))
                with self.subTest(source=source_name, target=target_name):
                    self.assertNotEqual(kind, "none")
                    theirs = torch.empty(source.shape, dtype=target)
                    theirs.copy_(source)
                    result = ours(source, source_name, target_name)
                    self.compare(source, theirs, result)
                    if kind == "lossless":
                        self.check_lossless(source, result)
                    compared += source.numel()
        print(f"{compared} values compared")

    def compare(self, source, theirs, result):
        mask = defined(source, theirs.dtype)
        if theirs.is_complex():
            theirs, result = theirs.real, result.real
            theirs, result = theirs.contiguous(), result.contiguous()
        both_nan = is_nan(theirs) & is_nan(result)
        wrong = (bits(theirs) != bits(result)) & mask & ~both_nan
        if wrong.any():
            at = int(wrong.nonzero()[0])
            self.fail(
                f"{int(wrong.sum())} of {source.numel()} differ, first: {source[at]} (bits {bits(source.contiguous())[at]:#x}) "
                f"became {result[at]}, torch says {theirs[at]}"
            )

    def check_lossless(self, source, result):
        """Back in the source dtype every value is what it was."""
        back = torch.empty(source.shape, dtype=source.dtype)
        back.copy_(result)
        same = (bits(back) == bits(source)) | (is_nan(back) & is_nan(source)) if not source.is_complex() else back == source
        self.assertTrue(bool(same.all()))


if __name__ == "__main__":
    unittest.main(argv=sys.argv)

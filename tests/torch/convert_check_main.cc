// Converts elements for comparison with PyTorch: convert_check FROM TO reads elements of FROM from standard
// input and writes the same number of elements of TO to standard output. Without arguments it prints one line
// per pair of dtypes: FROM, TO, and "lossless", "lossy" or "none".
#include <cstdio>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "tensor/convert.h"
#include "tensor/copy.h"

namespace {

using shardpull::DType;

void list_pairs() {
  for (std::uint8_t a = 1; shardpull::dtype_valid(a); ++a) {
    for (std::uint8_t b = 1; shardpull::dtype_valid(b); ++b) {
      const auto from = static_cast<DType>(a), to = static_cast<DType>(b);
      const char* const kind = a != b && convert_kernel(from, to) == nullptr ? "none"
                               : is_lossless(from, to)                       ? "lossless"
                                                                             : "lossy";
      std::cout << dtype_name(from) << ' ' << dtype_name(to) << ' ' << kind << '\n';
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    list_pairs();
    return 0;
  }
  if (argc != 3) return 2;
  const DType from = shardpull::dtype_from_name(argv[1]).value(),
              to = shardpull::dtype_from_name(argv[2]).value();
  const std::string input{std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()};
  const auto numel = static_cast<std::int64_t>(input.size()) * 8 / dtype_bits(from);
  const auto program = shardpull::compile_copy(shardpull::Slice::whole(numel),
                                               shardpull::SourceLayout::contiguous(from, numel), from,
                                               shardpull::contiguous_region(numel), to);
  if (!program.ok()) {
    std::cerr << program.status().to_string() << '\n';
    return 1;
  }
  std::vector<char> output(program->bytes);
  run(*program, reinterpret_cast<const std::byte*>(input.data()),
      reinterpret_cast<std::byte*>(output.data()));
  std::cout.write(output.data(), static_cast<std::streamsize>(output.size()));
  return 0;
}

// A stranger's program: the public headers and the archive, nothing else of the source tree.
#include <iostream>

#include "shardpull/dtype.h"

int main() {
  const auto dtype = shardpull::dtype_from_name("BF16");
  if (!dtype.ok()) return 1;
  std::cout << shardpull::dtype_name(dtype.value()) << " has " << shardpull::dtype_bits(dtype.value()) << " bits\n";
  return shardpull::dtype_from_name("BF17").ok() ? 1 : 0;
}

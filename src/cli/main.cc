#include "cli/command_line.h"

int main(int argc, char** argv) {
  return shardpull::cli::run(argc, argv);
}
